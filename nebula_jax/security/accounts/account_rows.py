"""Accounts as a transaction sees them: what was read before it may have changed."""

import sqlite3

from nebula_jax.security import accounts
from nebula_jax.security.accounts import (
    Account,
    IdentityError,
    identity_store,
    roles,
    throttle,
    tokens,
)


def row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    """Returns the row of an account, with its secrets; None if there is none."""
    if not accounts.is_name(name):  # and perhaps no text that SQLite takes
        return None
    query = "SELECT * FROM accounts WHERE name = ?"
    found: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    return found


def account(connection: sqlite3.Connection, name: str) -> Account:
    """Returns an account in whatever state.

    Raises:
      IdentityError: if there is none of this name.
    """
    found = row(connection, name)
    if found is None:
        raise missing(name)
    return accounts.from_row(found)


def actor(connection: sqlite3.Connection, by: Account) -> Account:
    """Returns who acts, as the account is now.

    Raises:
      IdentityError: if there is no such account.
      roles.DeniedError: if it is not active any more.
    """
    found = account(connection, by.name)
    roles.require_active(found)
    return found


def owner(connection: sqlite3.Connection) -> str | None:
    """Returns the name of the account that the folder belongs to."""
    query = "SELECT value FROM settings WHERE name = 'owner'"
    found = connection.execute(query).fetchone()
    return None if found is None else found["value"]


def check_not_owner(connection: sqlite3.Connection, name: str, what: str) -> None:
    """Checks that an account is not the one that the folder belongs to.

    Raises:
      IdentityError: if it is; `what` is the verb that it cannot.
    """
    if name == owner(connection):
        raise IdentityError(f"account {name} cannot {what}: the folder belongs to it")


def insert(
    connection: sqlite3.Connection,
    record: identity_store.Record,
    by: str,
    name: str,
    role: str,
    now: float,
) -> None:
    """Inserts an account in its first state."""
    connection.execute(
        "INSERT INTO accounts (name, role, state, share, created)"
        " VALUES (?, ?, ?, ?, ?)",
        (name, role, accounts.CREATED, accounts.Limits().share, now),
    )
    record("account.add", by, name=name, role=role)


def move(
    connection: sqlite3.Connection,
    record: identity_store.Record,
    by: str,
    name: str,
    event: str,
) -> None:
    """Moves an account along the table of transitions; revokes what it has to.

    Raises:
      IdentityError: if the table has no such transition.
    """
    before = account(connection, name).state
    after = accounts.next_state(name, before, event)
    connection.execute("UPDATE accounts SET state = ? WHERE name = ?", (after, name))
    if after != accounts.ACTIVE:
        tokens.revoke(connection, name)
    if after == accounts.REMOVED:
        set_password(connection, name, None)
        throttle.forget(connection, name)
    record(f"account.{event}", by, name=name, before=before, after=after)


def set_password(connection: sqlite3.Connection, name: str, hashed: str | None) -> None:
    """Sets the hash of a password; None if there is none any more."""
    connection.execute(
        "UPDATE accounts SET password = ? WHERE name = ?", (hashed, name)
    )


def missing(name: str) -> IdentityError:
    """Returns the error that there is no such account."""
    return IdentityError(
        f"there is no account {name}" if accounts.is_name(name) else "no such account"
    )


def check_not_removed(account: Account) -> None:
    """Checks that an account is not gone for good.

    Raises:
      IdentityError: if it is.
    """
    if account.state == accounts.REMOVED:
        raise IdentityError(f"account {account.name} is removed, which is final")
