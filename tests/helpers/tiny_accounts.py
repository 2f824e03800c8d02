"""Accounts and data of a lab."""

import contextlib
from unittest import mock

from nebula_jax import disk
from nebula_jax.security import accounts, grants
from nebula_jax.security import store as store_lib

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
PATH = "/data/secret-place/es"
USERS = {"ana": 60001, "ben": 60002, "eve": 60003, "bob": 60004}
"""Account -> user of the host."""


class Records(list):
    """A record of changes: (kind, who, what) each."""

    def __call__(self, kind, who, **what):
        self.append((kind, who, what))


def begin(folder, **options):
    """The accounts of a folder: root, who owns it."""
    with _no_power_cut():
        accounts.Accounts.begin(folder, "root")
    return reopen(folder, **options)


def reopen(folder, **options):
    with _no_power_cut():
        return accounts.Accounts.open(folder, **options)


@contextlib.contextmanager
def _no_power_cut():
    """Leaves out flushes, which a killed process does not miss: they take most time."""
    connect = store_lib._connect

    def fast(path):
        connection = connect(path)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    with (
        mock.patch.object(store_lib, "_connect", fast),
        mock.patch.object(disk, "sync"),
    ):
        yield


def person(here, name):
    """Adds an active account."""
    return here.add(name, USERS[name])


def handle(here, name="corpus-es"):
    """Registers a corpus."""
    data = grants.Grants(here)
    return data.register(name, {"path": PATH}, 1000, "ab" * 32, "News, 2019.")


def grant(here, subject, budget, name="corpus-es"):
    return grants.Grants(here).give(subject, name, budget, NOW)
