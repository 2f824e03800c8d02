"""Data by grant: corpora that others read through an interface, and never as files.

The owner of a lab registers a corpus as a handle. Everybody may see what the handle
says of it. The settings behind it, such as a path, are read with `provider` by the
process that serves it, and by no consumer.

A grant is who may read how much of which handle until when. A use is checked and
counted before it is served, in one change of the file: however many processes serve a
grant, together they never serve more than its budget. A process that is killed leaves
a use that was counted and perhaps not served, never one served and not counted.

The subject of a use is who the switches say has dialed: an account of this lab, whose
user its switch knows from the kernel, or one of another lab, as in `ana@lab-s`, for
which that lab vouches. It is never taken from what a reader sends.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security import accounts, store

MOST = 2**53
"""The largest number of rows or bytes: every JSON reader has it exactly."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,58}")
"""A handle's name is a part of its job's, which has up to 64 characters."""


class GrantError(errors.NebulaError):
    """A handle or a grant that is not there or cannot be, or a use that none permits.

    The use is over for the consumer, with a checkpoint.
    """


class Handle(NamedTuple):
    """A corpus as everybody may see it: nothing in it leads to the files."""

    name: str
    rows: int
    vocabulary: str  # SHA-256 in hexadecimal
    about: str  # a line for people


class Budget(NamedTuple):
    """The bounds of a grant, at least one of them."""

    rows: int | None = None  # None: as many as there are
    nbytes: int | None = None  # as they cross; None: as many as there are
    until: float | None = None  # unix seconds of a date; None: for ever


class Grant(NamedTuple):
    """A grant, and what was used of it."""

    subject: str  # `ana`, or `ana@lab-s`
    handle: str
    budget: Budget
    rows_used: int = 0
    nbytes_used: int = 0


def is_name(name: str) -> bool:
    """Returns True if a handle may have this name; no path is one."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Checks the name of a handle.

    Raises:
      GrantError: if no handle may have it.
    """
    if not is_name(name):
        raise GrantError(
            f"{printable.line(repr(name))} is no handle's name: those have up to 59"
            " small letters, digits and -, as in corpus-es"
        )


def date(seconds: float) -> str:
    """Returns a time (unix seconds) as a person reads it, in UTC.

    >>> date(1_800_000_000)
    '2027-01-15 08:00 UTC'
    """
    found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{found:%Y-%m-%d %H:%M} UTC"


def left(grant: Grant) -> dict[str, int | None]:
    """Returns the rows and bytes that are left; None where there is no bound."""
    rows, nbytes, _ = grant.budget
    return {
        "rows": None if rows is None else rows - grant.rows_used,
        "bytes": None if nbytes is None else nbytes - grant.nbytes_used,
    }


def status(grant: Grant, now: float) -> str:
    """Returns one word for people: `active`, `spent` or `expired`."""
    if grant.budget.until is not None and now >= grant.budget.until:
        return "expired"
    return "spent" if 0 in left(grant).values() else "active"


class Grants:
    """The handles and grants of a lab, in the file of its accounts."""

    def __init__(self, people: accounts.Accounts) -> None:
        self._people, self._store = people, people.store

    def register(
        self,
        name: str,
        provider: Mapping[str, Any],
        rows: int,
        vocabulary: str,
        about: str,
    ) -> Handle:
        """Registers a corpus.

        Args:
          name: of the handle; it is never given to another.
          provider: JSON object that the serving process understands, such as
            {"text_folder": "/data/es"}. No consumer gets it.
          vocabulary: digest of the vocabulary whose ids are served.

        Raises:
          GrantError: if the name is taken or is none.
        """
        check_name(name)
        made = Handle(name, rows, vocabulary, printable.line(about, 500))
        with self._store.changing() as tables:
            if name in tables["handles"]:
                raise GrantError(f"there is a handle {name} already")
            tables["handles"][name] = [*made[1:], dict(provider)]
            what = {"handle": name, "rows": rows, "vocabulary": vocabulary}
            self._people.record(tables, "data.register", **what)
        return made

    def handles(self) -> list[Handle]:
        """Returns all handles, by name."""
        tables = self._store.read()
        return [_handle(tables, name)[0] for name in sorted(tables["handles"])]

    def provider(self, name: str) -> tuple[dict[str, Any], Handle]:
        """Returns the settings behind a handle, for the process that serves it.

        Raises:
          GrantError: if there is no such handle.
        """
        found, settings = _handle(self._store.read(), name)
        return settings, found

    def give(self, subject: str, handle: str, budget: Budget, now: float) -> Grant:
        """Gives a grant, in place of an earlier one of the subject for the handle.

        Args:
          subject: an account here, or one of another lab.
          budget: counts from zero, whatever was used of an earlier grant.

        Raises:
          accounts.AccountError: if there is no such account here.
          GrantError: if the budget leaves nothing, or there is no such handle.
        """
        if budget == Budget():
            raise GrantError("a grant has a bound: rows, bytes, or a day when it ends")
        for count, what in ((budget.rows, "rows"), (budget.nbytes, "bytes")):
            if count is not None and not 0 < count <= MOST:
                raise GrantError(f"a grant has 1 to {MOST} {what}, not {count}")
        if budget.until is not None and budget.until <= now:
            raise GrantError(f"a grant until {date(budget.until)} is over already")
        accounts.check_subject(subject)
        with self._store.changing() as tables:
            _handle(tables, handle)
            if "@" not in subject:
                accounts.check_not_removed(accounts.account(tables, subject))
            given = Grant(subject, handle, budget)
            _keep(tables, given)
            self._people.record(tables, "grant.give", **_public(given))
        return given

    def revoke(self, subject: str, handle: str) -> None:
        """Revokes a grant: its next use is refused.

        Raises:
          GrantError: if there is none.
        """
        with self._store.changing() as tables:
            found = _grant(tables, subject, handle)
            del tables["grants"][f"{subject} {handle}"]
            self._people.record(tables, "grant.revoke", **_public(found))

    def listing(self) -> list[Grant]:
        """Returns all grants in the order in which they were given first."""
        tables = self._store.read()
        return [_grant(tables, *key.split()) for key in tables["grants"]]

    def use(
        self, subject: str, handle: str, rows: int, nbytes: int, now: float
    ) -> None:
        """Counts a use that is about to be served; all of it or, if refused, nothing.

        Args:
          subject: who reads, as proven.
          handle: its name, as the consumer sent it.
          rows: that will be served; none, before a session begins.

        Raises:
          GrantError: in one line with what is left and what to do; nothing may be
            served.
        """
        with self._store.changing() as tables:
            grant = _usable(tables, subject, handle, now)
            _check_left(grant, {"rows": rows, "bytes": nbytes})
            rows, nbytes = rows + grant.rows_used, nbytes + grant.nbytes_used
            _keep(tables, grant._replace(rows_used=rows, nbytes_used=nbytes))


_MORE = "get another from the owner of the data"


def _usable(tables: store.Tables, subject: str, handle: str, now: float) -> Grant:
    """Returns the grant for a use; what is left of it is still to be checked."""
    _handle(tables, handle)
    found = _grant(tables, subject, handle)
    if "@" not in subject:
        account = accounts.account(tables, subject)
        if account.state != accounts.ACTIVE:
            raise GrantError(f"{_named(found)} rests: the account is {account.state}")
    until = found.budget.until
    if until is not None and now >= until:
        amounts = [f"{count} {what}" for what, count in left(found).items() if count]
        leaving = f" with {' and '.join(amounts)} left" if amounts else ""
        raise GrantError(f"{_named(found)} ended on {date(until)}{leaving}: {_MORE}")
    return found


def _check_left(grant: Grant, wanted: Mapping[str, int]) -> None:
    """Checks that a grant has something left, and enough of it for a use."""
    for what, has in left(grant).items():
        if has == 0:
            raise GrantError(f"{_named(grant)} has no {what} left: {_MORE}")
        if has is not None and wanted[what] > has:
            raise GrantError(
                f"{_named(grant)} has {has} {what} left, and {wanted[what]} were"
                f" requested: read fewer, or {_MORE}"
            )


def _named(grant: Grant) -> str:
    return f"the grant of {grant.subject} for {grant.handle}"


def _handle(tables: store.Tables, name: str) -> tuple[Handle, dict[str, Any]]:
    """Returns a handle, and the settings behind it."""
    check_name(name)
    if name not in tables["handles"]:
        raise GrantError(f"there is no handle {name}: see which there are")
    *seen, provider = tables["handles"][name]
    return Handle(name, *seen), provider


def _grant(tables: store.Tables, subject: str, handle: str) -> Grant:
    check_name(handle)
    key = f"{subject} {handle}"
    if key not in tables["grants"]:
        raise GrantError(
            f"{printable.line(subject)} has no grant for {handle}, or it was revoked:"
            " request one from the owner of the data"
        )
    budget, *used = tables["grants"][key]
    return Grant(subject, handle, Budget(*budget), *used)


def _keep(tables: store.Tables, grant: Grant) -> None:
    tables["grants"][f"{grant.subject} {grant.handle}"] = list(grant[2:])


def _public(grant: Grant) -> dict[str, Any]:
    """Returns what the audit log has of a grant."""
    found = grant._asdict() | grant.budget._asdict()
    del found["budget"]
    until = grant.budget.until
    return found | {"until": None if until is None else date(until)}
