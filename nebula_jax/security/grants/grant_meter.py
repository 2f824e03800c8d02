"""The meter of a lab's grants: a use is checked and counted before it is served.

Both are one transaction: however many processes serve a grant, together they never
serve more than its budget. A process that is killed leaves a use that was counted and
perhaps not served, never one that was served and not counted.

The subject of a use is who the connection has proven to be: an account of this lab by
its token, or an account of the lab that a certificate names (`accounts.vouched`). It is
never taken from what a peer sends.
"""

import sqlite3
from typing import NamedTuple

from nebula_jax import printable
from nebula_jax.security import accounts, grants
from nebula_jax.security.accounts import identity
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import (
    ExpiredError,
    Grant,
    GrantError,
    NoGrantError,
    Remaining,
    RevokedError,
    SpentError,
    budgets,
    data_access,
)

MOST_JOB_CHARACTERS = 128


class Use(NamedTuple):
    """A use of a grant, as the audit has it."""

    number: int
    grant: int
    time: float  # unix seconds
    operation: str
    rows: int
    nbytes: int
    job: str


class Meter:
    """A meter of the uses of all grants in a lab's store.

    Args:
      store: of the lab's accounts, see `identity.Identity`.
    """

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def use(
        self,
        subject: str,
        handle: str,
        operation: str,
        rows: int,
        nbytes: int,
        now: float,
        job: str,
    ) -> Remaining:
        """Counts a use that is about to be served; all of it or, if refused, nothing.

        Args:
          subject: who reads, as proven.
          handle: its name, as the consumer sent it.
          operation: likewise.
          rows: that will be served.
          nbytes: that will cross.
          now: unix seconds.
          job: which reads, as in `ana/m3`.

        Returns:
          What is left after it.

        Raises:
          GrantError: NoGrantError, RevokedError, ExpiredError or SpentError, in one
            line with what is left and what to do; nothing may be served.
        """
        _check_amounts(rows, nbytes)
        if not job or job != printable.line(job, MOST_JOB_CHARACTERS):
            raise GrantError(f"{printable.line(repr(job))} is no name of a job")
        with self._store.writing() as connection:
            before = _usable(connection, subject, handle, operation, now)
            _check_left(before, rows, nbytes, _owner(connection, handle))
            connection.execute(
                "UPDATE grants SET rows_used = rows_used + ?,"
                " bytes_used = bytes_used + ? WHERE number = ?",
                (rows, nbytes, before.number),
            )
            connection.execute(
                "INSERT INTO uses (grant_number, time, operation, row_count,"
                " byte_count, job) VALUES (?, ?, ?, ?, ?, ?)",
                (before.number, now, operation, rows, nbytes, job),
            )
            return grants.left(grants.from_row(grants.row(connection, before.number)))

    def remaining(
        self, subject: str, handle: str, operation: str, now: float
    ) -> Remaining:
        """Returns what is left for a subject, before a job begins; see `use`."""
        with self._store.writing() as connection:
            found = _usable(connection, subject, handle, operation, now)
            _check_left(found, 0, 0, _owner(connection, handle))
            return grants.left(found)

    def uses(self, grant: int, after: int = 0, most: int = 1000) -> list[Use]:
        """Returns uses of a grant in their order.

        Args:
          grant: its number.
          after: only uses with a greater number: that of the last one returned.
          most: at a time; a run has a use for each batch.
        """
        rows = self._store.rows(
            "SELECT * FROM uses WHERE grant_number = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            (grant, after, most),
        )
        return [Use(*row) for row in rows]


def _usable(
    connection: sqlite3.Connection,
    subject: str,
    handle: str,
    operation: str,
    now: float,
) -> Grant:
    """Returns the grant for a use, whose budget is still to be checked."""
    found = _newest(connection, subject, handle)
    named = f"grant {found.number} of {subject} for {handle}"
    owner = _owner(connection, handle)
    if found.state == grants.REVOKED:
        raise RevokedError(f"{named} was revoked: get another from {owner}")
    if data_access.handle(connection, handle).state != data_access.OPEN:
        raise RevokedError(f"{named} has no data any more: {handle} was withdrawn")
    if "@" not in subject:
        account = identity.account(connection, subject)
        if account.state != accounts.ACTIVE:
            raise RevokedError(f"{named} rests: the account is {account.state}")
    if operation not in found.operations:
        raise NoGrantError(
            f"{named} has {', '.join(found.operations)}, not"
            f" {printable.line(operation, 40)}: request it from {owner}"
        )
    until = found.budget.until
    if until is not None and now >= until:
        raise ExpiredError(
            f"{named} ended on {budgets.date(until)}{_leaving(found)}: get another"
            f" from {owner}"
        )
    return found


def _newest(connection: sqlite3.Connection, subject: str, handle: str) -> Grant:
    """Returns the last grant for a subject and a handle, both as somebody sent them."""
    try:
        accounts.split_subject(subject)
        data_access.handle(connection, handle)
    except (accounts.IdentityError, data_access.DataError) as error:
        raise NoGrantError(str(error)) from None
    row = connection.execute(
        "SELECT * FROM grants WHERE subject = ? AND handle = ?"
        " ORDER BY number DESC LIMIT 1",
        (subject, handle),
    ).fetchone()
    if row is None:
        raise NoGrantError(
            f"{subject} has no grant for {handle}: request one from"
            f" {_owner(connection, handle)}"
        )
    return grants.from_row(row)


def _check_amounts(rows: int, nbytes: int) -> None:
    for count in (rows, nbytes):
        if type(count) is not int or not 0 <= count <= budgets.MOST:
            raise GrantError(f"{printable.line(count, 40)} cannot be counted")


def _check_left(grant: Grant, rows: int, nbytes: int, owner: str) -> None:
    """Checks that a grant has something left, and enough of it for a use."""
    left = grants.left(grant)
    for has, wanted, what in (
        (left.rows, rows, "rows"),
        (left.nbytes, nbytes, "bytes"),
    ):
        named = f"grant {grant.number} of {grant.subject} for {grant.handle}"
        if has == 0:
            raise SpentError(f"{named} has no {what} left: get another from {owner}")
        if has is not None and wanted > has:
            raise SpentError(
                f"{named} has {has} {what} left, and {wanted} were requested: read"
                f" fewer, or get another from {owner}"
            )


def _leaving(grant: Grant) -> str:
    left = grants.left(grant)
    amounts = [
        f"{count} {what}"
        for count, what in ((left.rows, "rows"), (left.nbytes, "bytes"))
        if count is not None
    ]
    return f" with {' and '.join(amounts)} left" if amounts else ""


def _owner(connection: sqlite3.Connection, handle: str) -> str:
    return data_access.handle(connection, handle).owner
