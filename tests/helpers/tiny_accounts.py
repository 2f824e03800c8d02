"""Accounts and data of a lab, with passwords whose hashes cost nothing."""

import contextlib
from unittest import mock

from argon2 import PasswordHasher

from nebula_jax import disk
from nebula_jax.security import grants
from nebula_jax.security.accounts import identity, logins, roles, tokens
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import handles

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
PASSWORD = "correct horse battery"

PATH = "/data/secret-place/es"


class Hasher:
    """argon2id with the smallest parameters; counts what it does."""

    def __init__(self, time_cost=1, memory_cost=8):
        self._hasher = PasswordHasher(time_cost, memory_cost, parallelism=1)
        self.calls = 0

    def hash(self, password):
        self.calls += 1
        return self._hasher.hash(password)

    def verify(self, stored, password):
        self.calls += 1
        return self._hasher.verify(stored, password)


class Records(list):
    """A record of changes: (kind, who, what) each."""

    def __call__(self, kind, who, **what):
        self.append((kind, who, what))


def begin(folder, **options):
    """The accounts of a folder: root, who owns it."""
    options = {"hasher": Hasher(), **options}
    with _no_power_cut():
        return identity.Identity.begin(folder, "root", **options)


def reopen(folder, **options):
    with _no_power_cut():
        return identity.Identity.open(folder, **{"hasher": Hasher(), **options})


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


def owner(here):
    return here.account_of(tokens.owner(here.folder), NOW)


def person(here, name, role=roles.RESEARCHER):
    """Adds an active account."""
    return logins.add(here, owner(here), name, role, PASSWORD)


def handle(here, by, name="corpus-es"):
    """Registers a corpus."""
    data = handles.Handles(here.store)
    return data.register(by, name, {"path": PATH}, 1000, "ab" * 32, "News, 2019.")


def grant(here, by, subject, budget, name="corpus-es"):
    return grants.Grants(here.store).give(by, subject, name, budget, NOW)
