"""Bytes from a stream, put where they belong.

Small parts are read through a stage, many by one call. A large buffer is a hole that
the stream fills directly; only what had already come to the stage is copied into it.
"""

import collections
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes; XLA takes a host buffer as it is only if aligned so
STAGE_BYTES = 1 << 12


class Assembly:
    """The bytes of one connection that are not yet a message."""

    def __init__(self):
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._start = self._end = 0
        self._holes: collections.deque[memoryview] = collections.deque()

    @property
    def has_holes(self) -> bool:
        """Whether a large buffer is being filled."""
        return bool(self._holes)

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; empty if the stage is full."""
        return self._holes[0] if self._holes else self._stage[self._end :]

    def filled(self, count: int) -> None:
        """`count` bytes were written to the start of `get_buffer()`."""
        if not self._holes:
            self._end += count
        elif count < len(self._holes[0]):
            self._holes[0] = self._holes[0][count:]
        else:
            self._holes.popleft()

    def staged(self) -> memoryview:
        """All staged bytes."""
        return self._stage[self._start : self._end]

    def peek(self, count: int) -> memoryview | None:
        """The next `count` staged bytes; None if they are not there yet."""
        end = self._start + count
        return self._stage[self._start : end] if end <= self._end else None

    def drop(self, count: int) -> None:
        """Takes `count` staged bytes off."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def take(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """[size] uint8 each for the next bytes; what has not come yet makes holes."""
        buffers = []
        for size in sizes:
            staged = self._end - self._start
            if size <= staged:  # small: aligning it would cost more than it saves
                part = self._stage[self._start : self._start + size]
                buffers.append(np.frombuffer(bytes(part), np.uint8))
                self.drop(size)
                continue
            buffer = aligned_empty(size)
            view = memoryview(buffer)
            if staged:
                view[:staged] = self._stage[self._start : self._end]
                self.drop(staged)
            self._holes.append(view[staged:])
            buffers.append(buffer)
        return buffers

    def compact(self) -> None:
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
