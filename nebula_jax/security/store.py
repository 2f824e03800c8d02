"""A private file of rows that several processes use: of accounts, or of an authority.

It is one JSON object below its own SHA-256, so that damage anywhere is found. A change
is made under a lock and is on the disk, whole or not at all, when it is done. Readers
take no lock: they find what the last change has left.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from nebula_jax import errors
from nebula_jax.security import private_files

MOST_BYTES = 1 << 26  # 300,000 grants

Tables = dict[str, dict[str, Any]]  # part -> the key of a row -> the row


class StoreError(errors.NebulaError):
    """A file that cannot be used; one line names it and what to do."""


class Store:
    """The file, in a private folder; its tables have the names `parts`."""

    def __init__(self, path: pathlib.Path, parts: Sequence[str]) -> None:
        self.path, self._parts = path, parts

    def create(self) -> None:
        """Makes the file without rows, unless it is there."""
        with self._locked():
            if not os.path.lexists(self.path):
                self._write({part: {} for part in self._parts})

    def read(self) -> Tables:
        """Returns all rows as of now; raises StoreError or PrivateFileError."""
        if not os.path.lexists(self.path):
            raise StoreError(
                f"{self.path}: not there: nebula init or nebula join makes the folder"
            )
        text = private_files.read(self.path, MOST_BYTES)
        digest, _, body = text.partition("\n")
        if digest != hashlib.sha256(body.encode()).hexdigest():
            raise StoreError(f"{self.path}: the file is damaged: put a copy of it back")
        found: Tables = json.loads(body)
        return found

    @contextlib.contextmanager
    def changing(self) -> Iterator[Tables]:
        """Yields all rows, and keeps what the block does to them unless that raises.

        Blocks are short, and do not nest: other processes wait. Raises as `read`, also
        for too large a file, a disk that fails, a process that hangs in a change.
        """
        with self._locked():
            tables = self.read()
            before = json.dumps(tables)
            yield tables
            if json.dumps(tables) != before:
                self._write(tables)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return private_files.locked(self.path.with_suffix(".lock"))

    def _write(self, tables: Tables) -> None:
        body = json.dumps(tables)
        digest = hashlib.sha256(body.encode()).hexdigest()
        text = f"{digest}\n{body}"
        if len(text) > MOST_BYTES:  # it could not be read again
            raise StoreError(f"{self.path}: would have more than {MOST_BYTES} bytes")
        private_files.write(self.path, text)
