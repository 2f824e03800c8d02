"""Logging in: a name and a password in exchange for a token.

A wrong name takes as long as a wrong password and is answered alike, and each failure
slows down the next try (`throttle`).
"""

import sqlite3
from typing import NamedTuple

from nebula_jax.security import accounts
from nebula_jax.security.accounts import (
    Account,
    account_rows,
    owner_token,
    passwords,
    roles,
    throttle,
    tokens,
)
from nebula_jax.security.accounts.identity import Identity

_WRONG = "no account has this name and password"


class LoginError(accounts.IdentityError):
    """A name and a password that do not belong together, or of no active account."""


class ThrottledError(LoginError):
    """A try to log in that came too early, whatever its password.

    Attributes:
      retry_at: unix seconds from which on another is taken.
    """

    def __init__(self, wait: float, retry_at: float) -> None:
        super().__init__(
            f"too many tries to log in have failed: try again in {wait:.0f} s"
        )
        self.retry_at = retry_at


class Login(NamedTuple):
    """A token, and whose it is until when (unix seconds)."""

    token: str
    account: Account
    expires: float

    def __repr__(self) -> str:
        return f"Login({self.account.name})"  # no token in a log


def login(
    identity: Identity,
    name: str,
    password: str,
    now: float,
    lifetime: float = tokens.LIFETIME,
) -> Login:
    """Logs a person in.

    Args:
      identity: the accounts.
      name: of one, as somebody typed it.
      password: likewise.
      now: unix seconds.
      lifetime: of the token, in seconds.

    Raises:
      LoginError: if name and password do not belong together, or the account is not
        active; ThrottledError if it was tried too often.
      passwords.PasswordError: if it cannot be checked at present.
    """
    proven = _prove(identity, name, password, now)
    renewed = proven
    if identity.hasher.check_needs_rehash(proven):
        renewed = passwords.hashed(identity.hasher, passwords.normal(password))
    with identity.store.writing() as connection:
        row = account_rows.row(connection, name)
        if row is None or row["password"] != proven:
            raise LoginError(_WRONG)  # it was changed in the meantime
        throttle.forget(connection, name)
        if row["state"] == accounts.ACTIVE:
            account_rows.set_password(connection, name, renewed)
            token = tokens.give(connection, name, now, lifetime)
            identity.record("login", name)
            return Login(token, accounts.from_row(row), now + lifetime)
    raise LoginError(f"account {name} is {row['state']}")


def logout(identity: Identity, token: str) -> None:
    """Revokes a token; one that is nobody's is no error.

    Raises:
      tokens.TokenError: if it cannot be one.
    """
    with identity.store.writing() as connection:
        tokens.revoke_one(connection, token)


def set_password(
    identity: Identity,
    by: Account,
    name: str,
    password: str,
    now: float,
    old: str = "",
) -> Account:
    """Sets a password, and revokes every token of the account.

    The folder's owner gets a new token in its file at once.

    Args:
      identity: the accounts.
      by: the account itself, or one that may change it.
      name: of the account.
      password: the new one.
      now: unix seconds.
      old: the present one, if it is `by`'s own and there is one.

    Raises:
      accounts.IdentityError: if the account is not there, or cannot have one.
      LoginError: if the old one is wrong.
      passwords.PasswordError: if the new one does not serve.
      roles.DeniedError: if `by` may not.
    """
    text = passwords.new(password)
    with identity.store.writing() as connection:  # denied before any work
        has_one = _check_may_set(connection, by, name)
    if by.name == name and has_one:
        _prove(identity, name, old, now)
    hashed = passwords.hashed(identity.hasher, text)
    with identity.store.writing() as connection:
        _check_may_set(connection, by, name)
        account_rows.set_password(connection, name, hashed)
        throttle.forget(connection, name)
        tokens.revoke(connection, name)
        identity.record("account.password", by.name, name=name)
        if name == account_rows.owner(connection):
            owner_token.replace(identity.folder, connection, name, now)
        return account_rows.account(connection, name)


def _check_may_set(connection: sqlite3.Connection, by: Account, name: str) -> bool:
    """Checks that `by` may set a password; returns True if there is one."""
    actor = account_rows.actor(connection, by)
    row = account_rows.row(connection, name)
    if row is None:
        raise account_rows.missing(name)
    if by.name != name:
        roles.require_over(actor, "account.password", name, row["role"])
    if row["state"] not in (accounts.ACTIVE, accounts.SUSPENDED):
        raise accounts.IdentityError(
            f"account {name} is {row['state']}, so it cannot get another password"
        )
    return row["password"] is not None


def _prove(identity: Identity, name: str, password: str, now: float) -> str:
    """Returns the hash that a password was found to fit; for errors see `login`."""
    try:
        text = passwords.normal(password)
    except passwords.PasswordError:
        raise LoginError(_WRONG) from None  # nobody's, so there is none to guess
    with identity.store.writing() as connection:
        row = account_rows.row(connection, name)
        who = name if row else throttle.bucket(connection, name)
        retry_at = throttle.count(connection, who, now)
    if retry_at is not None:
        raise ThrottledError(retry_at - now, retry_at)
    stored: str | None = row["password"] if row else None
    right = passwords.is_right(identity.hasher, stored, text)
    if not right or stored is None:
        # A name without an account may be a password, typed a line too early.
        identity.record("login.refused", name if row else "")
        raise LoginError(_WRONG)
    return stored
