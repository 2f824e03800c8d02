"""Accounts and data of a lab."""

from nebula_jax.security import accounts, grants

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
PATH = "/data/secret-place/es"
USERS = {"ana": 60001, "ben": 60002, "eve": 60003, "bob": 60004}
"""Account -> user of the host."""


class Records(list):
    """A record of changes: (kind, what) each."""

    def __call__(self, kind, **what):
        self.append((kind, what))


def begin(folder, **options):
    """The accounts of a folder: its owner's."""
    accounts.Accounts.begin(folder)
    return reopen(folder, **options)


def reopen(folder, **options):
    return accounts.Accounts(folder, **options)


def person(here, name):
    """Adds an active account."""
    return here.add(name, USERS[name])


def handle(here, name="corpus-es"):
    """Registers a corpus."""
    data = grants.Grants(here)
    return data.register(name, {"path": PATH}, 1000, "ab" * 32, "News, 2019.")


def grant(here, subject, rows=None, until=None, name="corpus-es"):
    given = grants.Grant(subject, name, rows, until)
    grants.Grants(here).give(given, NOW)
    return given
