"""Tokens: what a person who has logged in shows from then on.

A token is 32 random bytes as text. The store has its SHA-256 alone, by which it is
looked up: who reads the store finds no token, and no comparison's time reveals one.
"""

import hashlib
import re
import secrets
import sqlite3

from nebula_jax import errors

LIFETIME = 24 * 3600.0  # seconds
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


class TokenError(errors.NebulaError):
    """A token that is not, or no longer, anybody's."""


def give(
    connection: sqlite3.Connection, name: str, now: float, lifetime: float | None
) -> str:
    """Makes a token of an account, and forgets those of it that have expired.

    Args:
      connection: in a transaction that writes.
      name: of the account.
      now: unix seconds.
      lifetime: seconds; None for a token that lasts until it is revoked.
    """
    token = secrets.token_urlsafe(32)
    expires = None if lifetime is None else now + lifetime
    connection.execute(
        "DELETE FROM tokens WHERE account = ? AND expires <= ?", (name, now)
    )
    connection.execute(
        "INSERT INTO tokens (digest, account, created, expires) VALUES (?, ?, ?, ?)",
        (digest(token), name, now, expires),
    )
    return token


def digest(token: str) -> bytes:
    """Returns what the store has of a token.

    Raises:
      TokenError: if it is no token; the message does not repeat it.
    """
    if not _TOKEN.fullmatch(token):
        raise TokenError("this is no token: log in to get one")
    return hashlib.sha256(token.encode("ascii")).digest()


def revoke(connection: sqlite3.Connection, name: str) -> None:
    """Revokes every token of an account."""
    connection.execute("DELETE FROM tokens WHERE account = ?", (name,))


def revoke_one(connection: sqlite3.Connection, token: str) -> None:
    """Revokes a token, if it is one.

    Raises:
      TokenError: if it cannot be one.
    """
    connection.execute("DELETE FROM tokens WHERE digest = ?", (digest(token),))
