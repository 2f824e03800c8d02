"""A spool: tensors that wait for a line that is down, in memory and in a file.

Without one, a sender waits as soon as the send window is full. With one it goes on
until `limit` bytes wait. What exceeds `memory` lies in one file, used as a ring, that
has no name: nothing is left behind, however the process ends.
"""

import dataclasses
import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from nebula_jax import errors
from nebula_jax.communication.wire import frames

MEMORY_BYTES = 256 << 20  # little beside a model in training
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"([0-9]{1,18})\s?(|[kmgt]?b)", re.ASCII | re.IGNORECASE)


class SpoolError(errors.NebulaError):
    """A spool that cannot be written or read."""


def from_string(text: str) -> int:
    """Reads a flag such as 2GB, 500MB or 1000000: bytes.

    Raises:
      errors.SettingsError: if it is none.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise errors.SettingsError(
            f"--spool={text}: expected bytes, such as 500MB or 2GB"
        )
    unit = match[2].lower()
    return int(match[1]) * UNITS["" if unit == "b" else unit]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A buffer in the file of a spool."""

    start: int
    """The number of bytes that were stored before it."""
    size: int

    def __len__(self) -> int:
        """Returns its bytes."""
        return self.size


class Spool:
    """The room for tensors that the peer has not acknowledged, beyond a full window.

    One thread stores, in the order in which it sends; another loads and releases.
    """

    def __init__(
        self,
        limit: int = 0,
        folder: pathlib.Path = pathlib.Path(),
        memory: int = MEMORY_BYTES,
    ) -> None:
        """Starts empty, without a file.

        Args:
          limit: bytes of all tensors that wait; 0 for no spool.
          folder: for the file.
          memory: bytes of tensors that may wait before others go into the file.
        """
        self.limit, self.memory = limit, memory
        self.most_on_disk = 0
        """Bytes."""
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._head = self._tail = 0  # bytes that were released, and stored
        self._lock = threading.Lock()  # guards the two above

    @property
    def on_disk(self) -> int:
        """The bytes that are in the file."""
        return self._tail - self._head

    def store(self, message: frames.Tensor) -> frames.Tensor:
        """Writes a tensor's buffers to the file.

        Raises:
          SpoolError: if it cannot be written, such as to a full disk.
        """
        stored, start = [], self._tail
        size = frames.tensor_bytes(message)
        with self._lock:
            self._tail += size
        self.most_on_disk = max(self.most_on_disk, self.on_disk)
        try:
            for buffer in message.buffers:
                self._write(start, memoryview(buffer).cast("B"))
                stored.append(Stored(start, len(buffer)))
                start += len(buffer)
        except OSError as error:
            raise self._error(f"could not write {size:,} bytes", error) from None
        return message._replace(buffers=stored)

    def load(self, message: frames.Tensor) -> frames.Tensor:
        """Reads back what was stored; any other tensor stays as it is.

        Raises:
          SpoolError: if it cannot be read.
        """
        if not _is_stored(message):
            return message
        try:
            buffers = [self._read(each.start, each.size) for each in message.buffers]
        except OSError as error:
            raise self._error("could not read what was sent", error) from None
        return message._replace(buffers=buffers)

    def release(self, message: frames.Tensor) -> None:
        """Frees the room of a tensor, the oldest one that is stored."""
        if not _is_stored(message):
            return
        with self._lock:
            self._head += frames.tensor_bytes(message)
            if self._head == self._tail and self._file is not None:
                os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Frees the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, start: int, data: memoryview) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for at, part in self._parts(start, len(data)):
            view = data[part]
            while len(view):
                count = os.pwrite(self._file.fileno(), view, at)
                view, at = view[count:], at + count

    def _read(self, start: int, size: int) -> bytes:
        assert self._file is not None  # it was stored there
        found = []
        for at, part in self._parts(start, size):
            left = part.stop - part.start
            while left:
                data = os.pread(self._file.fileno(), left, at)
                if not data:
                    raise OSError("the file ends too early")
                found.append(data)
                at, left = at + len(data), left - len(data)
        return b"".join(found)

    def _parts(self, start: int, size: int) -> Iterator[tuple[int, slice]]:
        """Yields where the parts of a buffer lie in the ring, and what they are."""
        done = 0
        while done < size:
            at = (start + done) % self.limit
            count = min(size - done, self.limit - at)
            yield at, slice(done, done + count)
            done += count

    def _error(self, what: str, error: OSError) -> SpoolError:
        why = error.strerror or error
        return SpoolError(f"--spool: {what} in {self._folder}: {why}")


def _is_stored(message: Any) -> bool:
    return (
        type(message) is frames.Tensor
        and len(message.buffers) > 0
        and type(message.buffers[0]) is Stored
    )
