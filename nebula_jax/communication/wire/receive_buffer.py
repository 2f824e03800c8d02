"""Bytes from a stream, put where they belong.

Small parts are read through a stage, many by one call. A large buffer is a hole that
the stream fills directly; only what had already come to the stage is copied into it.

`exact` and `fill` are generators, for a parser that reads like blocking code: they
yield while bytes are missing, and are resumed when more have come.
"""

import collections
from collections.abc import Generator, Sequence

import numpy as np

ALIGNMENT = 64  # bytes; XLA takes a host buffer as it is only if aligned so
STAGE_BYTES = 1 << 12


class ReceiveBuffer:
    """The bytes of one connection that are not yet a message."""

    def __init__(self) -> None:
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._start = self._end = 0
        self._holes: collections.deque[memoryview] = collections.deque()

    @property
    def has_holes(self) -> bool:
        """True if a large buffer is being filled."""
        return bool(self._holes)

    def get_buffer(self) -> memoryview:
        """Returns the place of the next bytes; empty if the stage is full."""
        return self._holes[0] if self._holes else self._stage[self._end :]

    def receive(self, count: int) -> None:
        """Records that `count` bytes were written to the start of `get_buffer()`."""
        if not self._holes:
            self._end += count
        elif count < len(self._holes[0]):
            self._holes[0] = self._holes[0][count:]
        else:
            self._holes.popleft()

    def exact(self, count: int) -> Generator[None, None, bytes]:
        """Waits for the next bytes, and takes them off the stage.

        Args:
          count: at most STAGE_BYTES.
        """
        while self._end - self._start < count:
            self._compact()
            yield
        return self._take(count)

    def fill(self, sizes: Sequence[int]) -> Generator[None, None, list[np.ndarray]]:
        """Waits for the next bytes, in buffers of these sizes.

        Returns:
          [size] uint8 each.
        """
        buffers = []
        for size in sizes:
            staged = self._end - self._start
            if size <= staged:  # small: aligning it would cost more than it saves
                buffers.append(np.frombuffer(self._take(size), np.uint8))
                continue
            buffer = aligned_empty(size)
            view = buffer.data
            view[:staged] = self._take(staged)
            self._holes.append(view[staged:])
            buffers.append(buffer)
        while self._holes:
            yield
        return buffers

    def _take(self, count: int) -> bytes:
        data = bytes(self._stage[self._start : self._start + count])
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0
        return data

    def _compact(self) -> None:
        """Makes room on the stage behind what is left there."""
        if self._start:
            rest = bytes(self._stage[self._start : self._end])
            self._stage[: len(rest)] = rest
            self._start, self._end = 0, len(rest)


def aligned_empty(size: int) -> np.ndarray:
    """[size] uint8, uninitialised, at an address that XLA can take without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size]
