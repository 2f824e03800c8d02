"""Data by grant: corpora that others read through an interface, and never as files.

The owner of a lab registers a corpus as a handle. Everybody may see what the handle
says of it. The settings behind it, such as a path, are read with `provider` by the
process that serves it, and by no consumer.

A grant is who may read how much of which handle until when. A use is checked and
counted before it is served, in one transaction: however many processes serve a grant,
together they never serve more than its budget. A process that is killed leaves a use
that was counted and perhaps not served, never one that was served and not counted.

The subject of a use is who the switches say has dialed: an account of this lab, whose
user its switch knows from the kernel, or one of another lab, as in `ana@lab-s`, for
which that lab vouches. It is never taken from what a reader sends.
"""

import datetime
import json
import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable, strict_json
from nebula_jax.security import accounts

OPEN, WITHDRAWN = "open", "withdrawn"
ACTIVE, REVOKED, REPLACED = "active", "revoked", "replaced"
MOST = 2**53
"""The largest number of rows or bytes: every JSON reader has it exactly."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,58}")
"""A handle's name is a part of its job's, which has up to 64 characters."""


class DataError(errors.NebulaError):
    """A handle that is not there or cannot be."""


class GrantError(errors.NebulaError):
    """A use that no grant permits; it is over for the consumer, with a checkpoint."""


class NoGrantError(GrantError):
    """A use for which there is no grant."""


class SpentError(GrantError):
    """A use of more than is left."""


class ExpiredError(GrantError):
    """A use after the end of a grant."""


class RevokedError(GrantError):
    """A use of a grant that was revoked, or whose data or account is gone."""


class BudgetError(errors.NebulaError):
    """A budget that cannot be."""


class Handle(NamedTuple):
    """A corpus as everybody may see it: nothing in it leads to the files."""

    name: str
    rows: int
    vocabulary: str  # SHA-256 in hexadecimal
    about: str  # a line for people
    state: str  # OPEN or WITHDRAWN


class Budget(NamedTuple):
    """The bounds of a grant, at least one of them."""

    rows: int | None = None  # None: as many as there are
    nbytes: int | None = None  # as they cross; None: as many as there are
    until: float | None = None  # unix seconds, no more from then on; None: for ever


class Grant(NamedTuple):
    """A grant, and what was used of it."""

    number: int
    subject: str  # `ana`, or `ana@lab-s`
    handle: str
    budget: Budget
    rows_used: int
    nbytes_used: int
    state: str  # ACTIVE, REVOKED or REPLACED by a later one


def is_name(name: str) -> bool:
    """Returns True if a handle may have this name; no path is one."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Checks the name of a handle.

    Raises:
      DataError: if no handle may have it.
    """
    if not is_name(name):
        raise DataError(
            f"{printable.line(repr(name))} is no handle's name: those have up to 59"
            " small letters, digits and -, as in corpus-es"
        )


def check(budget: Budget, now: float) -> None:
    """Checks the budget of a grant that is given now (unix seconds).

    Raises:
      BudgetError: if it has no bound, or leaves nothing.
    """
    if budget == Budget():
        raise BudgetError("a grant has a bound: rows, bytes, or a day when it ends")
    for count, what in ((budget.rows, "rows"), (budget.nbytes, "bytes")):
        if count is not None and not 0 < count <= MOST:
            raise BudgetError(f"a grant has 1 to {MOST} {what}, not {count}")
    if budget.until is not None:
        if not math.isfinite(budget.until):
            raise BudgetError("a grant ends at a time, or has no end")
        if budget.until <= now:
            raise BudgetError(f"a grant until {date(budget.until)} is over already")


def date(seconds: float) -> str:
    """Returns a time (unix seconds) as a person reads it, in UTC.

    >>> date(1_800_000_000)
    '2027-01-15 08:00 UTC'
    """
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"
    return f"{found:%Y-%m-%d %H:%M} UTC"


def left(grant: Grant) -> dict[str, int | None]:
    """Returns the rows and bytes that are left; None where there is no bound."""
    rows, nbytes, _ = grant.budget
    return {
        "rows": None if rows is None else rows - grant.rows_used,
        "bytes": None if nbytes is None else nbytes - grant.nbytes_used,
    }


def status(grant: Grant, now: float) -> str:
    """Returns one word for people: a state, or `spent` or `expired`."""
    if grant.state != ACTIVE:
        return grant.state
    if grant.budget.until is not None and now >= grant.budget.until:
        return "expired"
    return "spent" if 0 in left(grant).values() else ACTIVE


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
          rows: of the corpus.
          vocabulary: digest of the vocabulary whose ids are served.
          about: a line for people.

        Raises:
          DataError: if the name is taken or is none.
        """
        check_name(name)
        made = Handle(name, rows, vocabulary, printable.line(about, 500), OPEN)
        with self._store.writing() as connection:
            if _row(connection, name) is not None:
                raise DataError(f"there is a handle {name} already, or there was")
            query = "INSERT INTO handles VALUES (?, ?, ?, ?, ?, ?)"
            connection.execute(query, (*made, json.dumps(dict(provider))))
            what = {"handle": name, "rows": rows, "vocabulary": vocabulary}
            self._people.record("data.register", **what)
            return made

    def withdraw(self, name: str) -> None:
        """Withdraws a handle for good: every use of it is refused from now on.

        Raises:
          DataError: if there is no such handle.
        """
        with self._store.writing() as connection:
            _handle(connection, name)
            query = "UPDATE handles SET state = ? WHERE name = ?"
            connection.execute(query, (WITHDRAWN, name))
            self._people.record("data.withdraw", handle=name)

    def handles(self) -> list[Handle]:
        """Returns all handles, by name."""
        rows = self._store.rows("SELECT * FROM handles ORDER BY name")
        return [Handle(*row[:-1]) for row in rows]

    def provider(self, name: str) -> tuple[dict[str, Any], Handle]:
        """Returns the settings behind a handle, for the process that serves it.

        Raises:
          DataError: if there is no such handle, or it was withdrawn.
        """
        with self._store.writing() as connection:
            found, row = _handle(connection, name), _row(connection, name)
        if found.state != OPEN:
            raise DataError(f"handle {name} is {found.state}: its data are gone")
        try:
            settings: dict[str, Any] = strict_json.loads(row["provider"] if row else "")
        except ValueError:
            raise DataError(f"the settings of {name} are damaged") from None
        return settings, found

    def give(self, subject: str, handle: str, budget: Budget, now: float) -> Grant:
        """Gives a grant, in place of an earlier one of the subject for the handle.

        Args:
          subject: an account here, or one of another lab.
          handle: its name.
          budget: counts from zero, whatever was used of an earlier grant.
          now: unix seconds.

        Raises:
          accounts.AccountError: if there is no such account here.
          BudgetError: if the budget leaves nothing.
          DataError: if there is no such handle, or it was withdrawn.
        """
        check(budget, now)
        accounts.check_subject(subject)
        with self._store.writing() as connection:
            if _handle(connection, handle).state != OPEN:
                raise DataError(f"handle {handle} was withdrawn")
            if "@" not in subject:
                accounts.check_not_removed(accounts.account(connection, subject))
            connection.execute(
                "UPDATE grants SET state = ? WHERE subject = ? AND handle = ?"
                " AND state = ?",
                (REPLACED, subject, handle, ACTIVE),
            )
            number = connection.execute(
                "INSERT INTO grants (subject, handle, row_budget, byte_budget, until,"
                " state) VALUES (?, ?, ?, ?, ?, ?)",
                (subject, handle, *budget, ACTIVE),
            ).lastrowid
            given = _grant(connection, number)
            self._people.record("grant.give", **_public(given))
            return given

    def revoke(self, number: int) -> Grant:
        """Revokes a grant: its next use is refused.

        Raises:
          NoGrantError: if there is none of this number, or it is not active.
        """
        with self._store.writing() as connection:
            before = _grant(connection, number)
            if before.state != ACTIVE:
                raise NoGrantError(f"grant {number} is {before.state} already")
            query = "UPDATE grants SET state = ? WHERE number = ?"
            connection.execute(query, (REVOKED, number))
            self._people.record("grant.revoke", **_public(before))
            return before._replace(state=REVOKED)

    def listing(
        self, subject: str | None = None, handle: str | None = None
    ) -> list[Grant]:
        """Returns grants in the order in which they were given, whatever their state.

        Args:
          subject: only its grants; None for everybody's.
          handle: only grants for it; None for all.
        """
        rows = self._store.rows(
            "SELECT * FROM grants WHERE (?1 IS NULL OR subject = ?1)"
            " AND (?2 IS NULL OR handle = ?2) ORDER BY number",
            (subject, handle),
        )
        return [_from_row(each) for each in rows]

    def use(
        self, subject: str, handle: str, rows: int, nbytes: int, now: float
    ) -> None:
        """Counts a use that is about to be served; all of it or, if refused, nothing.

        Args:
          subject: who reads, as proven.
          handle: its name, as the consumer sent it.
          rows: that will be served; none, before a session begins.
          nbytes: that will cross.
          now: unix seconds.

        Raises:
          GrantError: NoGrantError, RevokedError, ExpiredError or SpentError, in one
            line with what is left and what to do; nothing may be served.
        """
        if not (0 <= rows <= MOST and 0 <= nbytes <= MOST):
            raise GrantError(f"{rows} rows of {nbytes} bytes cannot be counted")
        with self._store.writing() as connection:
            grant = _usable(connection, subject, handle, now)
            _check_left(grant, {"rows": rows, "bytes": nbytes})
            connection.execute(
                "UPDATE grants SET rows_used = rows_used + ?,"
                " bytes_used = bytes_used + ? WHERE number = ?",
                (rows, nbytes, grant.number),
            )


_MORE = "get another from the owner of the data"


def _usable(
    connection: sqlite3.Connection, subject: str, handle: str, now: float
) -> Grant:
    """Returns the newest grant for a use; what is left of it is still to be checked."""
    try:
        accounts.check_subject(subject)
        data = _handle(connection, handle)
    except (accounts.AccountError, DataError) as error:
        raise NoGrantError(str(error)) from None
    row = connection.execute(
        "SELECT * FROM grants WHERE subject = ? AND handle = ?"
        " ORDER BY number DESC LIMIT 1",
        (subject, handle),
    ).fetchone()
    if row is None:
        raise NoGrantError(
            f"{subject} has no grant for {handle}: request one from its owner"
        )
    found = _from_row(row)
    if found.state == REVOKED:
        raise RevokedError(f"{_named(found)} was revoked: {_MORE}")
    if data.state != OPEN:
        raise RevokedError(
            f"{_named(found)} has no data any more: {handle} was withdrawn"
        )
    if "@" not in subject:
        account = accounts.account(connection, subject)
        if account.state != accounts.ACTIVE:
            raise RevokedError(f"{_named(found)} rests: the account is {account.state}")
    until = found.budget.until
    if until is not None and now >= until:
        amounts = [f"{count} {what}" for what, count in left(found).items() if count]
        leaving = f" with {' and '.join(amounts)} left" if amounts else ""
        raise ExpiredError(f"{_named(found)} ended on {date(until)}{leaving}: {_MORE}")
    return found


def _check_left(grant: Grant, wanted: Mapping[str, int]) -> None:
    """Checks that a grant has something left, and enough of it for a use."""
    for what, has in left(grant).items():
        if has == 0:
            raise SpentError(f"{_named(grant)} has no {what} left: {_MORE}")
        if has is not None and wanted[what] > has:
            raise SpentError(
                f"{_named(grant)} has {has} {what} left, and {wanted[what]} were"
                f" requested: read fewer, or {_MORE}"
            )


def _named(grant: Grant) -> str:
    return f"grant {grant.number} of {grant.subject} for {grant.handle}"


def _handle(connection: sqlite3.Connection, name: str) -> Handle:
    check_name(name)
    row = _row(connection, name)
    if row is None:
        raise DataError(f"there is no handle {name}: see which there are")
    return Handle(*row[:-1])


def _row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    query = "SELECT * FROM handles WHERE name = ?"
    row: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    return row


def _grant(connection: sqlite3.Connection, number: int | None) -> Grant:
    query = "SELECT * FROM grants WHERE number = ?"
    try:
        row = connection.execute(query, (number,)).fetchone()
    except OverflowError:  # SQLite's integers have 64 bits
        row = None
    if row is None:
        raise NoGrantError(f"there is no grant {number}")
    return _from_row(row)


def _from_row(row: sqlite3.Row) -> Grant:
    number, subject, handle, rows, nbytes, until, rows_used, bytes_used, state = row
    budget = Budget(rows, nbytes, until)
    return Grant(number, subject, handle, budget, rows_used, bytes_used, state)


def _public(grant: Grant) -> dict[str, Any]:
    """Returns what the audit log has of a grant."""
    until = grant.budget.until
    return {
        "number": grant.number,
        "subject": grant.subject,
        "handle": grant.handle,
        "rows": grant.budget.rows,
        "nbytes": grant.budget.nbytes,
        "until": None if until is None else date(until),
        "rows_used": grant.rows_used,
        "nbytes_used": grant.nbytes_used,
    }
