"""The files of an audit log: their names, the lock on them, and how they are written.

A folder `audit/` has

    log.jsonl          the entries, one line each
    leaves.bin         the hash of each line, 32 bytes, for finding the one that changed
    checkpoints.jsonl  every signed checkpoint
    checkpoint         the newest, as peers receive it
    verifier           the public key of the log, one line
    key.pem            its private half (0600)
    lock               held while one process writes
    cut.N.*            what a crash left half-written at entry N, kept as it was
    peers/             what this lab has witnessed of its peers' logs: `witness.py`
"""

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from nebula_jax import errors

LOCK_SECONDS = 10.0
"""Another process holds the lock for less than a millisecond, unless it is stopped."""
_POLL_SECONDS = 0.002
_NEW = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class AuditError(errors.NebulaError):
    """An error of the audit log: it cannot be written, or must not be believed."""


class Paths(NamedTuple):
    """The paths of one folder's files."""

    log: pathlib.Path
    leaves: pathlib.Path
    checkpoints: pathlib.Path
    checkpoint: pathlib.Path
    verifier: pathlib.Path
    key: pathlib.Path
    lock: pathlib.Path
    peers: pathlib.Path


def paths(folder: pathlib.Path) -> Paths:
    """Returns the paths of a folder's files, which need not exist."""
    return Paths(
        folder / "log.jsonl",
        folder / "leaves.bin",
        folder / "checkpoints.jsonl",
        folder / "checkpoint",
        folder / "verifier",
        folder / "key.pem",
        folder / "lock",
        folder / "peers",
    )


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of the disk into one line for a person.

    Raises:
      AuditError: that names the path.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise AuditError(
            f"{where}: the audit log needs it: {error.strerror or error}"
        ) from error


class Lock:
    """A lock among processes, and among those of one process that opened it apart."""

    def __init__(self, path: pathlib.Path, flags: int = os.O_RDWR | _NEW):
        """Opens the file of the lock.

        Args:
          path: of the file.
          flags: of `os.open`; the file is made if missing.

        Raises:
          OSError: if that is not possible.
        """
        self._path = path
        self._descriptor = os.open(path, flags, 0o600)

    @contextlib.contextmanager
    def held(
        self, shared: bool = False, seconds: float = LOCK_SECONDS
    ) -> Iterator[None]:
        """Holds the lock.

        Args:
          shared: for readers, who do not exclude one another.
          seconds: to wait at most.

        Raises:
          AuditError: if another has it for too long.
        """
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        begin = None
        while True:
            try:
                fcntl.flock(self._descriptor, how)
                break
            except BlockingIOError:
                now = time.monotonic()
                begin = now if begin is None else begin
            if now >= begin + seconds:
                raise AuditError(
                    f"{self._path}: another process has held this lock for"
                    f" {seconds:g} s; is it stopped?"
                )
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file; nothing else may follow."""
        os.close(self._descriptor)


def open_to_append(path: pathlib.Path) -> int:
    """Opens a file for reading and appending, made if missing; nobody else may read it.

    Raises:
      OSError: if that is not possible, or it is a symbolic link.
    """
    return os.open(path, os.O_RDWR | os.O_APPEND | _NEW, 0o600)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it, where one write may take a part.

    Raises:
      OSError: if the disk does not take it; a part of it may be there.
    """
    while data:
        data = data[os.write(descriptor, data) :]


def read_on(descriptor: int, begin: int, end: int) -> bytes:
    """Returns the bytes of a file from one position to another, or to its end."""
    found = []
    while begin < end and (data := os.pread(descriptor, end - begin, begin)):
        found.append(data)
        begin += len(data)
    return b"".join(found)
