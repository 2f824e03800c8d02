"""The accounts of a lab: users of its host, with a life, a share and a quota.

The user whose folder it is owns the lab: it runs the switch and every command, and its
account is there from the start. Other users of the host train with the lab's switch.
Who asks is what the kernel says (SO_PEERCRED, `federation.inner`): whoever came to the
host from outside has logged in there, so no password and no token is kept here, and
files, processes and memory of accounts are as far apart as those of the host's users.

An account is added, may be suspended and resumed, and is removed for good: its name is
never given again. Each change is recorded, in the transaction that makes it.
"""

import math
import os
import pathlib
import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from nebula_jax import errors, printable
from nebula_jax.security import names, private_files
from nebula_jax.security import store as store_lib

FILE = "identity.sqlite"  # in the folder of the federation
ACTIVE, SUSPENDED, REMOVED = "active", "suspended", "removed"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (ACTIVE, "suspend"): SUSPENDED,
    (SUSPENDED, "resume"): ACTIVE,
    (SUSPENDED, "remove"): REMOVED,
}
"""(state, event) -> the next state. Nothing else happens to an account; nothing follows
removal, and an active account is suspended first, so that no slip is final."""

MOST_BYTES = 2**50
"""The largest quota: sums of bytes stay far below 2**63."""
MOST_SHARE = 1000.0
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class AccountError(errors.NebulaError):
    """An account that is not there, or that cannot be what it was to become."""


class DeniedError(errors.NebulaError):
    """A request of a user who may not make it."""


class Limits(NamedTuple):
    """The part of the lab's line that an account has."""

    share: float = 1.0  # weight of its streams on a line that is full
    quota_bytes: int | None = None  # over the line, in all; None: no limit


class Account(NamedTuple):
    """An account."""

    name: str
    uid: int | None  # of the host's user; None: the user whose folder it is
    state: str
    limits: Limits
    charged_bytes: int  # of quota_bytes

    @property
    def is_owner(self) -> bool:
        """True for the account of the folder's own user."""
        return self.uid is None


class Accounts:
    """The accounts in one folder; several processes of its user may have it open.

    Attributes:
      store: the file, which records each change.
    """

    def __init__(self, store: store_lib.Store) -> None:
        self.store = store

    @classmethod
    def begin(cls, folder: pathlib.Path, owner: str) -> None:
        """Makes the accounts of a folder: its owner's. A second time changes nothing.

        Args:
          folder: of the federation; made if only it is missing.
          owner: the name of the account, see `name_for`.

        Raises:
          AccountError: if the folder has another owner.
          store.StoreError: if the file does not serve.
          private_files.PrivateFileError: if others can use the folder or the file.
        """
        check_name(owner)
        folder = private_files.folder(folder.resolve())
        store_lib.create(folder / FILE)
        with cls.open(folder) as made, made.store.writing() as connection:
            query = "SELECT name FROM accounts WHERE uid IS NULL"
            before = connection.execute(query).fetchone()
            if before is None:
                _insert(connection, Account(owner, None, ACTIVE, Limits(), 0))
            elif before["name"] != owner:
                raise AccountError(
                    f"{folder}: belongs to account {before['name']}, not to {owner}"
                )

    @classmethod
    def open(
        cls, folder: pathlib.Path, record: store_lib.Record = store_lib.unrecorded
    ) -> Self:
        """Opens the accounts of a folder.

        Args:
          folder: of the federation.
          record: is called for each change.

        Raises:
          store.StoreError, private_files.PrivateFileError: as `begin`.
        """
        folder = private_files.folder(folder.resolve())
        return cls(store_lib.Store(folder / FILE, record))

    def close(self) -> None:
        """Closes the file."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def owner(self) -> Account:
        """Returns the account of the user whose folder it is, as it is at present."""
        return _account(self.store.rows("SELECT * FROM accounts WHERE uid IS NULL")[0])

    def of_user(self, uid: int) -> Account:
        """Returns the account of a user of the host, as it is at present.

        Args:
          uid: as the kernel has it; no request says it.

        Raises:
          DeniedError: if the user has none, or it is not active.
        """
        if uid == os.geteuid():
            return self.owner()
        query = "SELECT * FROM accounts WHERE uid = ? AND state != ?"
        rows = self.store.rows(query, (uid, REMOVED))
        if not rows:
            raise DeniedError(
                f"user {uid} of this host has no account in this lab: its owner adds"
                " one with `nebula account add`"
            )
        found = _account(rows[0])
        if found.state != ACTIVE:
            raise DeniedError(f"{found.name} may do nothing: it is {found.state}")
        return found

    def find(self, name: str) -> Account:
        """Returns an account in whatever state.

        Raises:
          AccountError: if there is none of this name.
        """
        with self.store.writing() as connection:
            return account(connection, name)

    def listing(self) -> list[Account]:
        """Returns all accounts, by name, those removed too."""
        rows = self.store.rows("SELECT * FROM accounts ORDER BY name")
        return [_account(row) for row in rows]

    def add(self, name: str, uid: int) -> Account:
        """Adds an account for a user of the host.

        Raises:
          AccountError: if the name is taken, or ever was, or the user has an account.
        """
        check_name(name)
        made = Account(name, uid, ACTIVE, Limits(), 0)
        query = "SELECT name, state FROM accounts WHERE name = ? OR (uid = ? AND"
        query += " state != ?)"
        with self.store.writing() as connection:
            found = connection.execute(query, (name, uid, REMOVED)).fetchone()
            if uid == os.geteuid():
                raise AccountError(f"user {uid} owns this lab: no account is needed")
            if found is not None and found["name"] != name:
                raise AccountError(f"user {uid} has the account {found['name']}")
            if found is not None:
                raise AccountError(
                    f"there is an account {name} already"
                    if found["state"] != REMOVED
                    else f"account {name} was removed: its name is not given again"
                )
            _insert(connection, made)
            self.record("account.add", name=name, uid=uid)
            return made

    def move(self, name: str, event: str) -> Account:
        """Moves an account along the table of transitions.

        Args:
          name: of the account.
          event: `suspend`, `resume` or `remove`.

        Raises:
          AccountError: if it is not there, in another state, or the owner's.
        """
        with self.store.writing() as connection:
            before = account(connection, name)
            if before.is_owner:
                raise AccountError(
                    f"account {name} cannot {event}: the folder belongs to it"
                )
            after = next_state(name, before.state, event)
            query = "UPDATE accounts SET state = ? WHERE name = ?"
            connection.execute(query, (after, name))
            what = {"name": name, "before": before.state, "after": after}
            self.record(f"account.{event}", **what)
            return before._replace(state=after)

    def set_limits(self, name: str, limits: Limits) -> Account:
        """Sets the share of the line and the quota of an account.

        Raises:
          AccountError: if the account is not there, or a limit is out of bounds.
        """
        check_limits(limits)
        with self.store.writing() as connection:
            before = account(connection, name)
            check_not_removed(before)
            query = "UPDATE accounts SET share = ?, quota_bytes = ? WHERE name = ?"
            connection.execute(query, (*limits, name))
            self.record("account.limits", name=name, **limits._asdict())
            return before._replace(limits=limits)

    def charge(self, name: str, count: int) -> None:
        """Charges an account with bytes that have crossed the line.

        All are charged, whatever its quota and its state are: they have crossed.
        Whether more may cross, `barred` says. Each call writes to the disk.

        Raises:
          AccountError: if there is no such account.
          store.StoreError: if they cannot be written; then none is charged.
        """
        with self.store.writing() as connection:
            total = account(connection, name).charged_bytes + count
            query = "UPDATE accounts SET charged_bytes = ? WHERE name = ?"
            connection.execute(query, (total, name))

    def record(self, kind: str, **what: object) -> None:
        """Records a change, which the owner makes, in its transaction."""
        self.store.record(kind, self.owner().name, **what)


def account(connection: sqlite3.Connection, name: str) -> Account:
    """Returns an account as a transaction sees it, in whatever state.

    Raises:
      AccountError: if there is none of this name.
    """
    found, shown = None, "of this name"  # which is perhaps no text that SQLite takes
    if is_name(name):
        query, shown = "SELECT * FROM accounts WHERE name = ?", name
        found = connection.execute(query, (name,)).fetchone()
    if found is None:
        raise AccountError(f"there is no account {shown}")
    return _account(found)


def check_not_removed(found: Account) -> None:
    """Checks that an account is not gone for good; raises AccountError if it is."""
    if found.state == REMOVED:
        raise AccountError(f"account {found.name} is removed, which is final")


def next_state(name: str, state: str, event: str) -> str:
    """Returns the state of an account after an event, such as `suspend`.

    Raises:
      AccountError: if the table has no such transition; names the account.
    """
    if (state, event) not in TRANSITIONS:
        possible = [each for before, each in TRANSITIONS if before == state]
        raise AccountError(
            f"account {name} is {state}, so it cannot {event};"
            f" possible: {' or '.join(possible) or 'nothing, this is final'}"
        )
    return TRANSITIONS[state, event]


def barred(listing: Iterable[Account]) -> dict[str, str]:
    """Returns the accounts of which nothing may cross the line: name -> reason."""
    found = {}
    for name, _, state, limits, charged_bytes in listing:
        quota = limits.quota_bytes
        if state != ACTIVE:
            found[name] = f"{name} may do nothing: it is {state}"
        elif quota is not None and charged_bytes >= quota:
            found[name] = (
                f"{name}: its quota of {quota} bytes over the line is used up: get a"
                " larger one"
            )
    return found


def is_name(name: str) -> bool:
    """Returns True if an account may have this name."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Checks the name of an account.

    Raises:
      AccountError: if no account may have it.
    """
    if not is_name(name):
        raise AccountError(
            f"{printable.line(repr(name))} is no account's name: those have up to 32"
            " small letters, digits and -, a letter first, as in ana"
        )


def name_for(user: str) -> str:
    """Returns the name of an account for a user of this machine.

    >>> name_for("Ana.Maria")
    'ana-maria'
    >>> name_for("42")
    'owner'
    """
    name = re.sub(r"[^a-z0-9]+", "-", user.lower()).lstrip("0123456789-")
    return name[:32].rstrip("-") or "owner"


def check_limits(limits: Limits) -> None:
    """Checks the limits that an account is to have.

    Raises:
      AccountError: if the share or the quota is out of bounds.
    """
    share, quota = limits
    if not (math.isfinite(share) and 0 < share <= MOST_SHARE):
        raise AccountError(
            f"a share of the line is more than 0 and at most {MOST_SHARE:g}, not"
            f" {share:g}"
        )
    if quota is not None and not 0 <= quota <= MOST_BYTES:
        raise AccountError(f"a quota has 0 to {MOST_BYTES} bytes, not {quota}")


def check_subject(subject: str) -> None:
    """Checks the subject of a grant: `ana`, or `ana@lab-s` of another lab.

    Raises:
      AccountError: if it is neither.
    """
    name, at, lab = subject.partition("@")
    check_name(name)
    if at and (not names.is_cluster(lab) or ":" in lab):
        raise AccountError(
            f"{printable.line(repr(lab))} is no lab's name: those have small letters,"
            " digits and -, as in lab-s"
        )


def _insert(connection: sqlite3.Connection, new: Account) -> None:
    values = (*new[:3], *new.limits, new.charged_bytes)
    connection.execute("INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?)", values)


def _account(row: sqlite3.Row) -> Account:
    name, uid, state, share, quota, charged = row
    return Account(name, uid, state, Limits(share, quota), charged)
