"""Grants: who may read how much of which data until when.

A use is checked and counted before it is served, in one transaction: however many
processes serve a grant, together they never serve more than its budget. A process that
is killed leaves a use that was counted and perhaps not served, never one that was
served and not counted.

The subject of a use is who the connection has proven to be: an account of this lab by
its token, or an account of the lab that a certificate names (`accounts.vouched`). It is
never taken from what a peer sends.
"""

import datetime
import math
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors
from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, identity, roles
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import handles

ACTIVE, REVOKED, REPLACED = "active", "revoked", "replaced"
MOST = 2**53
"""The largest number of rows or bytes: every JSON reader has it exactly."""


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
    """The grants in a lab's store."""

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def give(
        self, by: Account, subject: str, handle: str, budget: Budget, now: float
    ) -> Grant:
        """Gives a grant, in place of an earlier one of the subject for the handle.

        Args:
          by: the owner of the handle, or of the lab.
          subject: an account here, or one of another lab.
          handle: its name.
          budget: counts from zero, whatever was used of an earlier grant.
          now: unix seconds.

        Raises:
          accounts.IdentityError: if there is no such account here.
          BudgetError: if the budget leaves nothing.
          handles.DataError: if there is no such handle, or it was withdrawn.
          roles.DeniedError: if `by` may not.
        """
        check(budget, now)
        account, lab = accounts.split_subject(subject)
        with self._store.writing() as connection:
            found = handles.handle(connection, handle)
            actor = identity.actor(connection, by)
            roles.require_data(actor, "grant.give", found.owner)
            if found.state != handles.OPEN:
                raise handles.DataError(f"handle {handle} was withdrawn")
            if not lab:
                identity.check_not_removed(identity.account(connection, account))
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
            self._store.record("grant.give", by.name, **_public(given))
            return given

    def revoke(self, by: Account, number: int) -> Grant:
        """Revokes a grant: its next use is refused.

        Raises:
          NoGrantError: if there is none of this number, or it is not active.
          roles.DeniedError: if `by` may not.
        """
        with self._store.writing() as connection:
            before = _grant(connection, number)
            actor = identity.actor(connection, by)
            owner = handles.handle(connection, before.handle).owner
            roles.require_data(actor, "grant.revoke", owner)
            if before.state != ACTIVE:
                raise NoGrantError(f"grant {number} is {before.state} already")
            query = "UPDATE grants SET state = ? WHERE number = ?"
            connection.execute(query, (REVOKED, number))
            self._store.record("grant.revoke", by.name, **_public(before))
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
            grant, owner = _usable(connection, subject, handle, now)
            _check_left(grant, {"rows": rows, "bytes": nbytes}, owner)
            connection.execute(
                "UPDATE grants SET rows_used = rows_used + ?,"
                " bytes_used = bytes_used + ? WHERE number = ?",
                (rows, nbytes, grant.number),
            )


def _usable(
    connection: sqlite3.Connection, subject: str, handle: str, now: float
) -> tuple[Grant, str]:
    """Returns the newest grant for a use, and the owner of the data.

    What is left of the grant is still to be checked.
    """
    try:
        accounts.split_subject(subject)
        data = handles.handle(connection, handle)
    except (accounts.IdentityError, handles.DataError) as error:
        raise NoGrantError(str(error)) from None
    row = connection.execute(
        "SELECT * FROM grants WHERE subject = ? AND handle = ?"
        " ORDER BY number DESC LIMIT 1",
        (subject, handle),
    ).fetchone()
    if row is None:
        raise NoGrantError(
            f"{subject} has no grant for {handle}: request one from {data.owner}"
        )
    found = _from_row(row)
    if found.state == REVOKED:
        raise RevokedError(
            f"{_named(found)} was revoked: get another from {data.owner}"
        )
    if data.state != handles.OPEN:
        raise RevokedError(
            f"{_named(found)} has no data any more: {handle} was withdrawn"
        )
    if "@" not in subject:
        account = identity.account(connection, subject)
        if account.state != accounts.ACTIVE:
            raise RevokedError(f"{_named(found)} rests: the account is {account.state}")
    until = found.budget.until
    if until is not None and now >= until:
        amounts = [f"{count} {what}" for what, count in left(found).items() if count]
        leaving = f" with {' and '.join(amounts)} left" if amounts else ""
        raise ExpiredError(
            f"{_named(found)} ended on {date(until)}{leaving}: get another from"
            f" {data.owner}"
        )
    return found, data.owner


def _check_left(grant: Grant, wanted: Mapping[str, int], owner: str) -> None:
    """Checks that a grant has something left, and enough of it for a use."""
    for what, has in left(grant).items():
        if has == 0:
            raise SpentError(
                f"{_named(grant)} has no {what} left: get another from {owner}"
            )
        if has is not None and wanted[what] > has:
            raise SpentError(
                f"{_named(grant)} has {has} {what} left, and {wanted[what]} were"
                f" requested: read fewer, or get another from {owner}"
            )


def _named(grant: Grant) -> str:
    return f"grant {grant.number} of {grant.subject} for {grant.handle}"


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
