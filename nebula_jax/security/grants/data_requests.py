"""Requests to be granted data: kept for the owner of a handle, who decides."""

import sqlite3
from collections.abc import Collection
from typing import NamedTuple

from nebula_jax import printable
from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, identity, roles
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import data_access
from nebula_jax.security.grants.data_access import DataError

REQUESTED, GRANTED, REFUSED = "requested", "granted", "refused"
MOST_REQUESTS = 100
"""Open requests of one lab: another could fill the disk."""
MOST_CHARACTERS = 500  # of a request's reason


class Request(NamedTuple):
    """A request to be granted something."""

    number: int
    subject: str  # `ana`, or `ana@lab-s`
    handle: str
    operations: tuple[str, ...]
    why: str  # one line, in the requester's words
    state: str  # REQUESTED, GRANTED or REFUSED
    created: float  # unix seconds


class Requests:
    """The requests in a lab's store.

    Args:
      store: of the lab's accounts, see `identity.Identity`.
    """

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def keep(
        self,
        subject: str,
        name: str,
        operations: Collection[str],
        why: str,
        now: float,
    ) -> Request:
        """Keeps a request for the owner of a handle; the same one once.

        Args:
          subject: an account here, or one that another lab has vouched for, see
            `accounts.vouched`.
          name: of the handle.
          operations: of OPERATIONS.
          why: the reason, for the owner to read; what cannot be printed is replaced.
          now: unix seconds.

        Raises:
          DataError: if there is no such handle, or too many requests are open.
          accounts.IdentityError: if the subject is none.
          roles.DeniedError: if an account here may not.
        """
        wanted = " ".join(data_access.operations_of(operations))
        account, lab = accounts.split_subject(subject)
        with self._store.writing() as connection:
            if not lab:
                found = identity.account(connection, account)
                roles.require(found, "data.request")
            if data_access.handle(connection, name).state != data_access.OPEN:
                raise DataError(f"handle {name} was withdrawn")
            here = connection.execute(
                "SELECT * FROM requests WHERE lab = ? AND state = ?", (lab, REQUESTED)
            ).fetchall()
            for row in here:
                same = (row["subject"], row["handle"], row["operations"])
                if same == (subject, name, wanted):
                    return _request(row)
            if len(here) >= MOST_REQUESTS:
                raise DataError(
                    f"{MOST_REQUESTS} requests of {lab or 'this lab'} are open: their"
                    " owners have to decide first"
                )
            why = printable.line(why, MOST_CHARACTERS)
            number = connection.execute(
                "INSERT INTO requests (subject, lab, handle, operations, why, state,"
                " created) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (subject, lab, name, wanted, why, REQUESTED, now),
            ).lastrowid
            self._store.record(
                "data.request", subject, handle=name, operations=wanted, why=why
            )
            return _request(_row(connection, number))

    def refuse(self, by: Account, number: int) -> Request:
        """Refuses a request.

        Raises:
          DataError: if there is none of this number, or it is decided.
          roles.DeniedError: if `by` may not.
        """
        with self._store.writing() as connection:
            found = _row(connection, number)
            actor = identity.actor(connection, by)
            owner = data_access.handle(connection, found["handle"]).owner
            roles.require_data(actor, "grant.give", owner)
            if found["state"] != REQUESTED:
                raise DataError(f"request {number} is {found['state']} already")
            connection.execute(
                "UPDATE requests SET state = ? WHERE number = ?", (REFUSED, number)
            )
            self._store.record("data.refuse", by.name, request=number)
            return _request(_row(connection, number))

    def listing(self, state: str | None = None) -> list[Request]:
        """Returns the requests of everybody, the oldest first.

        Args:
          state: only those in it; None for all.
        """
        rows = self._store.rows(
            "SELECT * FROM requests WHERE ?1 IS NULL OR state = ?1 ORDER BY number",
            (state,),
        )
        return [_request(row) for row in rows]


def grant_covered(
    connection: sqlite3.Connection,
    subject: str,
    name: str,
    operations: Collection[str],
) -> None:
    """Marks the open requests that a new grant covers as granted."""
    query = "SELECT * FROM requests WHERE subject = ? AND handle = ? AND state = ?"
    for row in connection.execute(query, (subject, name, REQUESTED)).fetchall():
        if set(_request(row).operations) <= set(operations):
            connection.execute(
                "UPDATE requests SET state = ? WHERE number = ?",
                (GRANTED, row["number"]),
            )


def _row(connection: sqlite3.Connection, number: int | None) -> sqlite3.Row:
    query = "SELECT * FROM requests WHERE number = ?"
    row: sqlite3.Row | None
    try:
        row = connection.execute(query, (number,)).fetchone()
    except OverflowError:  # SQLite's integers have 64 bits
        row = None
    if row is None:
        raise DataError(f"there is no request {number}")
    return row


def _request(row: sqlite3.Row) -> Request:
    return Request(
        row["number"],
        row["subject"],
        row["handle"],
        tuple(row["operations"].split()),
        row["why"],
        row["state"],
        row["created"],
    )
