"""The database of an authority: its tables, and transactions on it.

Several threads and processes use it at once: a switch that certifies, and a command
that invites or revokes. What a transaction has written outlives a power cut.
"""

import contextlib
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator

from nebula_jax.security.membership.site_folder import FederationError

PATIENCE = 10.0
"""Seconds for the transactions of other processes, which take milliseconds."""

_TABLES = (
    # Of a secret, the authority has the SHA-256.
    """CREATE TABLE IF NOT EXISTS invitations (
        digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
        lab TEXT NOT NULL,
        expires INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('open', 'used', 'withdrawn'))
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS labs (
        name TEXT PRIMARY KEY,
        state TEXT NOT NULL CHECK (state IN ('member', 'revoked')),
        since INTEGER NOT NULL
    ) STRICT""",
    # Serial numbers have up to 160 bits; they are hexadecimal.
    """CREATE TABLE IF NOT EXISTS issued (
        serial TEXT PRIMARY KEY,
        lab TEXT NOT NULL,
        role TEXT NOT NULL,
        not_after INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS revoked (
        serial TEXT PRIMARY KEY REFERENCES issued (serial),
        since INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS revocation_list (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        number INTEGER NOT NULL,
        signed INTEGER NOT NULL,
        pem BLOB NOT NULL
    ) STRICT""",
)


class Store:
    """The file authority.sqlite.

    Args:
      path: of the file; it is made if missing, for this user alone.

    Raises:
      FederationError: if the file does not serve.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(
                path,
                timeout=PATIENCE,
                isolation_level=None,  # transactions begin where we begin them
                check_same_thread=False,  # the lock keeps threads apart
            )
        except (OSError, sqlite3.Error) as error:
            raise FederationError(f"{path}: {error}") from None
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            with self.transaction() as connection:
                for table in _TABLES:
                    connection.execute(table)
        except (sqlite3.Error, FederationError) as error:
            self._connection.close()
            raise FederationError(f"{path}: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begins a transaction that alone may write; it is undone if the block raises.

        Raises:
          FederationError: if SQLite fails.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                text = f"{self._path}: {error}"
                raise FederationError(text) from None

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()
