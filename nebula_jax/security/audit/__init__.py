"""A site's audit log: who did what, which nobody can change unnoticed.

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

`log.py` writes them, `verify.py` reads them offline; both go by `paths`.
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


class AuditError(errors.NebulaError):
    """An error of the audit log: it cannot be written, or must not be believed."""


class Paths(NamedTuple):
    """The paths of one folder's files, which need not exist."""

    log: pathlib.Path
    leaves: pathlib.Path
    checkpoints: pathlib.Path
    checkpoint: pathlib.Path
    verifier: pathlib.Path
    key: pathlib.Path
    lock: pathlib.Path
    peers: pathlib.Path


def paths(folder: pathlib.Path) -> Paths:
    """Returns the paths of a folder's files."""
    entries = ("log.jsonl", "leaves.bin", "checkpoints.jsonl", "checkpoint")
    others = ("verifier", "key.pem", "lock", "peers")
    return Paths._make(folder / name for name in entries + others)


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


@contextlib.contextmanager
def locked(
    path: pathlib.Path, shared: bool = False, seconds: float = LOCK_SECONDS
) -> Iterator[None]:
    """Excludes other processes, and other threads of this one.

    Args:
      path: of the lock; made if missing, unless it is shared.
      shared: for readers, who do not exclude one another.
      seconds: to wait at most.

    Raises:
      AuditError: if another has it for too long.
      OSError: if there is no such file, or it cannot be made.
    """
    flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise AuditError(
                        f"{path}: another process has held this lock for {seconds:g} s;"
                        " is it stopped?"
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back


class File:
    """A file of a log, which grows at its end; other processes append to it too."""

    def __init__(self, path: pathlib.Path):
        """Opens it, made if missing; nobody else may read it, and no link leads to it.

        Raises:
          OSError: if that is not possible.
        """
        self.end = 0
        """Bytes of it that were read or written here so far."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._stream = os.fdopen(os.open(path, flags, 0o600), "r+b", 0)
        self.close = self._stream.close

    def size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size

    def rest(self) -> bytes:
        """Returns what follows `end`."""
        self._stream.seek(self.end)
        return self._stream.readall()

    def write(self, data: bytes) -> None:
        """Appends all of it, where one write may take a part."""
        while data:
            data = data[os.write(self._stream.fileno(), data) :]

    def cut(self, end: int) -> None:
        os.ftruncate(self._stream.fileno(), end)

    def sync(self) -> None:
        os.fdatasync(self._stream.fileno())
