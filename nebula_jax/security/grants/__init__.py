"""Grants: who may read how much of which data until when. `grant_meter` counts uses."""

import sqlite3
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from nebula_jax import errors
from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, identity, roles
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import budgets, data_access, data_requests
from nebula_jax.security.grants.budgets import Budget

ACTIVE, REVOKED, REPLACED = "active", "revoked", "replaced"


class GrantError(errors.NebulaError):
    """A use that no grant permits; it is over for the consumer, with a checkpoint.

    Attributes:
      reason: one word for the audit log.
    """

    reason = "grant"


class NoGrantError(GrantError):
    """A use for which there is no grant, or one for other operations."""

    reason = "no-grant"


class SpentError(GrantError):
    """A use of more than is left."""

    reason = "spent"


class ExpiredError(GrantError):
    """A use after the end of a grant."""

    reason = "expired"


class RevokedError(GrantError):
    """A use of a grant that was revoked, or whose data or account is gone."""

    reason = "revoked"


class Grant(NamedTuple):
    """A grant, and what was used of it."""

    number: int
    subject: str  # `ana`, or `ana@lab-s`
    handle: str
    operations: tuple[str, ...]
    budget: Budget
    rows_used: int
    nbytes_used: int
    state: str  # ACTIVE, REVOKED or REPLACED by a later one
    given_by: str
    created: float  # unix seconds


class Remaining(NamedTuple):
    """The part of a grant that is left after a use; None where it has no bound."""

    grant: int
    rows: int | None
    nbytes: int | None
    until: float | None  # unix seconds


def status(grant: Grant, now: float) -> str:
    """Returns one word for people: a state, or `spent` or `expired`."""
    if grant.state != ACTIVE:
        return grant.state
    if grant.budget.until is not None and now >= grant.budget.until:
        return "expired"
    return "spent" if 0 in left(grant)[:2] else ACTIVE


class Grants:
    """The grants in a lab's store.

    Args:
      store: of the lab's accounts, see `identity.Identity`.
    """

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def give(
        self,
        by: Account,
        subject: str,
        handle: str,
        operations: Collection[str],
        budget: Budget,
        now: float,
    ) -> Grant:
        """Gives a grant, in place of an earlier one of the subject for the handle.

        Requests of the subject that it covers are granted with it.

        Args:
          by: the owner of the handle, or of the lab.
          subject: an account here, or one of another lab.
          handle: its name.
          operations: of `data_access.OPERATIONS`.
          budget: counts from zero, whatever was used of an earlier grant.
          now: unix seconds.

        Raises:
          accounts.IdentityError: if there is no such account here.
          budgets.BudgetError: if the budget leaves nothing.
          data_access.DataError: if there is no such handle.
          roles.DeniedError: if `by` may not.
        """
        permitted = data_access.operations_of(operations)
        budgets.check(budget, now)
        account, lab = accounts.split_subject(subject)
        with self._store.writing() as connection:
            found = data_access.handle(connection, handle)
            actor = identity.actor(connection, by)
            roles.require_data(actor, "grant.give", found.owner)
            if found.state != data_access.OPEN:
                raise data_access.DataError(f"handle {handle} was withdrawn")
            if not lab:
                found_account = identity.account(connection, account)
                identity.check_not_removed(found_account)
            connection.execute(
                "UPDATE grants SET state = ? WHERE subject = ? AND handle = ?"
                " AND state = ?",
                (REPLACED, subject, handle, ACTIVE),
            )
            number = connection.execute(
                "INSERT INTO grants (subject, handle, operations, row_budget,"
                " byte_budget, until, state, given_by, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (subject, handle, " ".join(permitted), *budget, ACTIVE, by.name, now),
            ).lastrowid
            data_requests.grant_covered(connection, subject, handle, permitted)
            given = from_row(row(connection, number))
            self._store.record("grant.give", by.name, **_public(given))
            return given

    def revoke(self, by: Account, number: int) -> Grant:
        """Revokes a grant: its next use is refused.

        Raises:
          NoGrantError: if there is none of this number, or it is not active.
          roles.DeniedError: if `by` may not.
        """
        with self._store.writing() as connection:
            before = from_row(row(connection, number))
            actor = identity.actor(connection, by)
            owner = data_access.handle(connection, before.handle).owner
            roles.require_data(actor, "grant.revoke", owner)
            if before.state != ACTIVE:
                raise NoGrantError(f"grant {number} is {before.state} already")
            connection.execute(
                "UPDATE grants SET state = ? WHERE number = ?", (REVOKED, number)
            )
            after = from_row(row(connection, number))
            self._store.record("grant.revoke", by.name, **_public(after))
            return after

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
        return [from_row(each) for each in rows]


def left(grant: Grant) -> Remaining:
    """Returns what is left of a grant."""
    rows, nbytes, until = grant.budget
    return Remaining(
        grant.number,
        None if rows is None else rows - grant.rows_used,
        None if nbytes is None else nbytes - grant.nbytes_used,
        until,
    )


def row(connection: sqlite3.Connection, number: int | None) -> sqlite3.Row:
    """Returns the row of a grant.

    Raises:
      NoGrantError: if there is none of this number.
    """
    query = "SELECT * FROM grants WHERE number = ?"
    found: sqlite3.Row | None
    try:
        found = connection.execute(query, (number,)).fetchone()
    except OverflowError:  # SQLite's integers have 64 bits
        found = None
    if found is None:
        raise NoGrantError(f"there is no grant {number}")
    return found


def from_row(row: sqlite3.Row) -> Grant:
    """Returns the grant in a row of the table `grants`."""
    return Grant(
        row["number"],
        row["subject"],
        row["handle"],
        tuple(row["operations"].split()),
        Budget(row["row_budget"], row["byte_budget"], row["until"]),
        row["rows_used"],
        row["bytes_used"],
        row["state"],
        row["given_by"],
        row["created"],
    )


def _public(grant: Grant) -> Mapping[str, Any]:
    """Returns what the audit log has of a grant."""
    until = grant.budget.until
    return {
        "number": grant.number,
        "subject": grant.subject,
        "handle": grant.handle,
        "operations": " ".join(grant.operations),
        "rows": grant.budget.rows,
        "nbytes": grant.budget.nbytes,
        "until": None if until is None else budgets.date(until),
        "rows_used": grant.rows_used,
        "nbytes_used": grant.nbytes_used,
    }
