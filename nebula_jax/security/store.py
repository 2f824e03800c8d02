"""The file of a lab's accounts, handles and grants: transactions on it.

One SQLite file, which several processes use at once. A transaction that writes begins
as one (BEGIN IMMEDIATE), so that what it reads stays so until it commits; a commit is
on the disk when it returns (synchronous=FULL), and a process that is killed leaves
what the last commit left. The file appears with its tables in it, or not at all.
"""

import contextlib
import os
import pathlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nebula_jax import errors, files, printable
from nebula_jax.security import private_files

BUSY_SECONDS = 10.0
"""Longer than any transaction of ours waits for a disk; then something hangs."""

Record = Callable[..., object]
"""Called as `record(kind, who, **what)` in the transaction of a change, before its
commit: a change that cannot be recorded is not made. No secret is among the values."""


APPLICATION, VERSION = 0x6E62616A, 3  # "nbaj"; see PRAGMA application_id
_TABLES = """
CREATE TABLE accounts (
  name TEXT PRIMARY KEY,
  uid INTEGER,
  state TEXT NOT NULL CHECK (state IN ('active', 'suspended', 'removed')),
  share REAL NOT NULL CHECK (share > 0),
  quota_bytes INTEGER CHECK (quota_bytes >= 0),
  charged_bytes INTEGER NOT NULL DEFAULT 0 CHECK (charged_bytes >= 0)
) STRICT;
CREATE UNIQUE INDEX one_owner ON accounts (uid IS NULL) WHERE uid IS NULL;
CREATE UNIQUE INDEX one_account_of_a_user ON accounts (uid) WHERE state != 'removed';
CREATE TABLE handles (
  name TEXT PRIMARY KEY,
  row_count INTEGER NOT NULL,
  vocabulary TEXT NOT NULL,
  about TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'withdrawn')),
  provider TEXT NOT NULL
) STRICT;
CREATE TABLE grants (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  subject TEXT NOT NULL,
  handle TEXT NOT NULL REFERENCES handles (name),
  row_budget INTEGER CHECK (row_budget > 0),
  byte_budget INTEGER CHECK (byte_budget > 0),
  until REAL,
  rows_used INTEGER NOT NULL DEFAULT 0,
  bytes_used INTEGER NOT NULL DEFAULT 0,
  state TEXT NOT NULL CHECK (state IN ('active', 'revoked', 'replaced')),
  CHECK (row_budget IS NULL OR rows_used <= row_budget),
  CHECK (byte_budget IS NULL OR bytes_used <= byte_budget)
) STRICT;
CREATE UNIQUE INDEX one_active_grant ON grants (subject, handle)
  WHERE state = 'active';
CREATE INDEX grants_of_subject ON grants (subject, handle, number);
"""

_DAMAGED = "the file is damaged: put a copy of it back"
_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process has been writing for {BUSY_SECONDS:g} s",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_FULL: "the disk is full: free some of it",
    sqlite3.SQLITE_IOERR: "the disk fails, or is full",
    sqlite3.SQLITE_READONLY: "this user cannot write there",
    sqlite3.SQLITE_CANTOPEN: "this user cannot open or write it",
    sqlite3.SQLITE_CONSTRAINT: "a row would break a rule of the tables",
}


class StoreError(errors.NebulaError):
    """A file that cannot be used; one line names it and what to do."""


def unrecorded(kind: str, who: str, **what: Any) -> None:
    """Records nothing: a `Record` for those who keep no audit log."""


def create(path: pathlib.Path) -> None:
    """Makes a file without rows, in a private folder, unless it is there.

    Raises:
      StoreError: if the disk does not take it.
    """
    if os.path.lexists(path):
        return
    try:
        with files.writing(path) as partial, _translated(path):
            # SQLite gives the files that it makes beside it the same mode.
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with contextlib.closing(_connect(partial)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.executescript(_TABLES)
    except OSError as error:
        raise StoreError(f"{path}: cannot be made: {error.strerror}") from None


class Store:
    """An open file. Threads may share one; processes open their own.

    Attributes:
      path: of the file.
      record: is called for each change, in its transaction.
    """

    def __init__(
        self,
        path: pathlib.Path,
        record: Record = unrecorded,
    ) -> None:
        """Opens a file that `create` has made.

        Raises:
          StoreError: if the file is missing, damaged, or of another version.
          private_files.PrivateFileError: if others can use it.
        """
        self.path, self.record = path, record
        self._lock = threading.RLock()
        if not os.path.lexists(path):
            raise StoreError(
                f"{path}: not there: nebula init or nebula join makes the folder"
            )
        private_files.check_file(path)
        with _translated(path):
            self._connection = _connect(path)
            try:
                _check_version(self._connection, path)
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Closes the file; nothing is waiting to be written."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection in a transaction; what the block raises undoes it.

        Blocks are short, and do not nest: other processes wait.

        Raises:
          StoreError: if the file cannot be written.
        """
        with self._lock, _translated(self.path), _transaction(self._connection):
            yield self._connection

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Returns the rows that one SELECT finds, as they were last committed.

        Raises:
          StoreError: if the file cannot be read.
        """
        with self._lock, _translated(self.path):
            return self._connection.execute(query, parameters).fetchall()

    def findings(self) -> list[str]:
        """Returns what SQLite finds wrong in the whole file, a line each; [] if sound.

        Raises:
          StoreError: if the file cannot be read at all.
        """
        found = [row[0] for row in self.rows("PRAGMA integrity_check")]
        found += [
            f"table {row[0]}: row {row[1]} refers to nothing in {row[2]}"
            for row in self.rows("PRAGMA foreign_key_check")
        ]
        return [printable.line(each) for each in found if each != "ok"]


def _connect(path: pathlib.Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,  # transactions begin and end where we write so
        check_same_thread=False,  # `Store` has a lock
    )
    connection.row_factory = sqlite3.Row
    for setting in ("foreign_keys = ON", "synchronous = FULL", "trusted_schema = OFF"):
        connection.execute(f"PRAGMA {setting}")
    return connection


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check_version(connection: sqlite3.Connection, path: pathlib.Path) -> None:
    version = _number(connection, "user_version")
    if _number(connection, "application_id") != APPLICATION:
        raise StoreError(f"{path}: is no file of accounts: put a copy of it back")
    if version != VERSION:
        raise StoreError(
            f"{path}: has version {version}, and this Nebula reads {VERSION}: use the"
            " one that wrote it, or found the federation anew"
        )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite may have done so by itself
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _translated(path: pathlib.Path) -> Iterator[None]:
    """Makes errors of the file StoreErrors; a wrong call of ours stays what it is."""
    try:
        yield
    except UnicodeDecodeError:  # of a message about what is no text any more
        raise StoreError(f"{path}: {_DAMAGED}") from None
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.ProgrammingError):
            raise
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        advice = _ADVICE.get(code, "is it a file of ours?")
        why = printable.line(" ".join(str(error).split()))
        raise StoreError(f"{path}: {advice} ({why})") from None
