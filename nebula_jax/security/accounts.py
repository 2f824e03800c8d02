"""The accounts of a lab: users of its host, with a life, a share and a quota.

The user whose folder it is owns the lab: it runs the switch and every command, and its
account, `owner`, is there from the start. Other users of the host train with the lab's
switch. Who asks is what the kernel says (SO_PEERCRED, `federation.inner`): whoever came
to the host from outside has logged in there, so no password and no token is kept here,
and files, processes and memory of accounts are as far apart as those of the users.

An account is added, may be suspended and resumed, and is removed for good: its name is
never given again. No change is made that is not recorded.
"""

import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from nebula_jax import errors, printable
from nebula_jax.security import private_files
from nebula_jax.security import store as store_lib
from nebula_jax.security.membership import site_folder

FILE = "people.json"  # in the folder of the federation
OWNER = "owner"  # the account of the user whose folder it is
ACTIVE, SUSPENDED, REMOVED = "active", "suspended", "removed"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (ACTIVE, "suspend"): SUSPENDED,
    (SUSPENDED, "resume"): ACTIVE,
    (SUSPENDED, "remove"): REMOVED,
}
"""(state, event) -> the next state. Nothing else happens to an account; nothing follows
removal, and an active account is suspended first, so that no slip is final."""

PARTS = ("accounts", "handles", "grants")  # of the file
Record = Callable[..., object]
"""Called as `record(kind, **what)` within a change, which is the owner's, before it is
written: a change that cannot be recorded is not made. No secret is among the values."""
MOST_BYTES = 2**50  # the largest quota: sums of bytes stay far below 2**63
MOST_SHARE = 1000.0
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class AccountError(errors.NebulaError):
    """An account that is not there, or that may not do or become what was asked."""


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

    @property
    def is_owner(self) -> bool:
        """True for the account of the folder's own user."""
        return self.name == OWNER


class Accounts:
    """The accounts in one folder; several processes of its user may have it open."""

    def __init__(self, folder: pathlib.Path, record: Record | None = None) -> None:
        """Takes a folder's accounts; raises PrivateFileError if others can use it."""
        folder = private_files.folder(folder.resolve())
        self.store = store_lib.Store(folder / FILE, PARTS)  # handles and grants, too
        self._record = record

    @classmethod
    def begin(cls, folder: pathlib.Path) -> Self:
        """Makes the owner's account, once; raises StoreError or PrivateFileError."""
        made = cls(folder)
        made.store.create()
        with made.store.changing() as tables:
            if OWNER not in tables["accounts"]:
                _keep(tables, Account(OWNER, None, ACTIVE, Limits()))
        return made

    def of_user(self, uid: int) -> Account:
        """Returns the account of a uid; raises AccountError unless it is active."""
        if uid == os.geteuid():
            return self.find(OWNER)
        found = _of_user(self.store.read(), uid)
        if found is None:
            raise AccountError(
                f"user {uid} of this host has no account in this lab: its owner adds"
                " one with `nebula account add`"
            )
        if found.state != ACTIVE:
            raise AccountError(f"{found.name} may do nothing: it is {found.state}")
        return found

    def find(self, name: str) -> Account:
        """Returns an account in whatever state; raises AccountError without one."""
        return account(self.store.read(), name)

    def listing(self) -> list[Account]:
        """Returns all accounts, by name, those removed too."""
        return sorted(_all(self.store.read()))

    def add(self, name: str, uid: int) -> Account:
        """Adds a user's account; raises AccountError if name or user is taken."""
        check_name(name)
        made = Account(name, uid, ACTIVE, Limits())
        with self.store.changing() as tables:
            if uid == os.geteuid():
                raise AccountError(f"user {uid} owns this lab: no account is needed")
            if name in tables["accounts"]:
                raise AccountError(
                    f"there is an account {name} already"
                    if account(tables, name).state != REMOVED
                    else f"account {name} was removed: its name is not given again"
                )
            if (other := _of_user(tables, uid)) is not None:
                raise AccountError(f"user {uid} has the account {other.name}")
            _keep(tables, made)
            self.record("account.add", name=name, uid=uid)
        return made

    def move(self, name: str, event: str) -> Account:
        """Does `suspend`, `resume` or `remove`; raises AccountError if it cannot be."""
        with self.store.changing() as tables:
            before = account(tables, name)
            if before.is_owner:
                raise AccountError(
                    f"account {name} cannot {event}: the folder belongs to it"
                )
            if (before.state, event) not in TRANSITIONS:
                possible = [
                    each for state, each in TRANSITIONS if state == before.state
                ]
                raise AccountError(
                    f"account {name} is {before.state}, so it cannot {event};"
                    f" possible: {' or '.join(possible) or 'nothing, this is final'}"
                )
            after = before._replace(state=TRANSITIONS[before.state, event])
            _keep(tables, after)
            what = {"name": name, "before": before.state, "after": after.state}
            self.record(f"account.{event}", **what)
        return after

    def set_limits(self, name: str, limits: Limits) -> Account:
        """Sets share and quota of an account; raises AccountError if they cannot be."""
        share, quota = limits
        if not (math.isfinite(share) and 0 < share <= MOST_SHARE):
            raise AccountError(
                f"a share of the line is more than 0 and at most {MOST_SHARE:g}, not"
                f" {share:g}"
            )
        if quota is not None and not 0 <= quota <= MOST_BYTES:
            raise AccountError(f"a quota has 0 to {MOST_BYTES} bytes, not {quota}")
        with self.store.changing() as tables:
            after = account(tables, name)._replace(limits=limits)
            check_not_removed(after)
            _keep(tables, after)
            self.record("account.limits", name=name, **limits._asdict())
        return after

    def record(self, kind: str, **what: object) -> None:
        """Records a change within it."""
        if self._record is not None:
            self._record(kind, **what)


def account(tables: store_lib.Tables, name: str) -> Account:
    """Returns an account, in whatever state; raises AccountError if there is none."""
    if name not in tables["accounts"]:
        shown = name if is_name(name) else "of this name"
        raise AccountError(f"there is no account {shown}")
    uid, state, limits = tables["accounts"][name]
    return Account(name, uid, state, Limits(*limits))


def _all(tables: store_lib.Tables) -> list[Account]:
    return [account(tables, name) for name in tables["accounts"]]


def _of_user(tables: store_lib.Tables, uid: int) -> Account | None:
    found = (each for each in _all(tables) if each.uid == uid)
    return next((each for each in found if each.state != REMOVED), None)


def _keep(tables: store_lib.Tables, new: Account) -> None:
    tables["accounts"][new.name] = list(new[1:])


def check_not_removed(found: Account) -> None:
    """Checks that an account is not gone for good; raises AccountError if it is."""
    if found.state == REMOVED:
        raise AccountError(f"account {found.name} is removed, which is final")


def why_barred(found: Account, total: int) -> str:
    """Returns why an account may send no more after `total` bytes; empty if it may."""
    quota = found.limits.quota_bytes
    if found.state != ACTIVE:
        return f"{found.name} may do nothing: it is {found.state}"
    if quota is not None and total >= quota:
        return (
            f"{found.name}: its quota of {quota} bytes over the line is used up: get a"
            " larger one"
        )
    return ""


def is_name(name: str) -> bool:
    """Returns True if an account may have this name."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Raises AccountError if no account may have a name."""
    if not is_name(name):
        raise AccountError(
            f"{printable.line(repr(name))} is no account's name: those have up to 32"
            " small letters, digits and -, a letter first, as in ana"
        )


def check_subject(subject: str) -> None:
    """Raises AccountError or FederationError unless it is `ana`, or `ana@lab-s`."""
    name, at, lab = subject.partition("@")
    check_name(name)
    if at:
        site_folder.check_lab(lab)
