"""A site's audit log: who did what, which nobody can change unnoticed.

A folder `audit/` has

    log.jsonl      the entries, one line each
    head           the newest signed head, which covers all entries before it
    cosigned       the newest head that each peer has cosigned, a line each
    verifier       the public key of the log, one line
    key.pem        its private half (0600)
    lock           held by the one process that has it open
    cut.N.*        what a crash left half-written at entry N, kept as it was
    peers/         what this lab has witnessed of its peers' logs: `witness.py`

`log.py` writes them, `verify.py` reads them offline; both go by `paths`.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from nebula_jax import errors


class AuditError(errors.NebulaError):
    """An error of the audit log: it cannot be written, or must not be believed."""


class Paths(NamedTuple):
    """The paths of one folder's files, which need not exist."""

    log: pathlib.Path
    head: pathlib.Path
    cosigned: pathlib.Path
    verifier: pathlib.Path
    key: pathlib.Path
    lock: pathlib.Path
    peers: pathlib.Path


def paths(folder: pathlib.Path) -> Paths:
    """Returns the paths of a folder's files."""
    names = ("log.jsonl", "head", "cosigned", "verifier", "key.pem", "lock", "peers")
    return Paths._make(folder / name for name in names)


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of the disk into an AuditError, one line that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise AuditError(
            f"{where}: the audit log needs it: {error.strerror or error}"
        ) from error
