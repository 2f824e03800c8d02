"""Bytes from a stream, put where they belong.

Small parts are read through a stage, many by one call. A large buffer is a hole that
the stream fills directly; only what had already come to the stage is copied into it. A
parser that reads like blocking code is a generator, and waits by a loop:

    while (head := buffer.take(10)) is None:
        yield                   # resumed when more bytes have come
"""

import collections
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes; XLA takes a host buffer as it is only if aligned so
STAGE_BYTES = 1 << 12


class ReceiveBuffer:
    """The bytes of one connection that are not yet a message."""

    def __init__(self) -> None:
        self._bytes = bytearray(STAGE_BYTES)
        self._stage = memoryview(self._bytes)
        self._start = self._end = 0
        self._holes: collections.deque[memoryview] = collections.deque()
        self.has_holes = False  # True if a large buffer is being filled

    def get_buffer(self) -> memoryview:
        """Returns the place of the next bytes; empty if the stage is full."""
        if self.has_holes:
            return self._holes[0]
        return self._stage[self._end :] if self._end else self._stage

    def receive(self, count: int) -> None:
        """Records that `count` bytes were written to the start of `get_buffer()`."""
        if not self.has_holes:
            self._end += count
        elif count < len(self._holes[0]):
            self._holes[0] = self._holes[0][count:]
        else:
            self._holes.popleft()
            self.has_holes = bool(self._holes)

    def take(self, count: int) -> bytearray | None:
        """Takes at most STAGE_BYTES off the stage; None if they have not all come."""
        end = self._start + count
        if end > self._end:
            if self._start:  # makes room on the stage behind what is left there
                rest = self._bytes[self._start : self._end]
                self._stage[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            return None
        data = self._bytes[self._start : end]
        if end == self._end:
            self._start = self._end = 0
        else:
            self._start = end
        return data

    def place(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Makes the next bytes' buffers, [size] uint8; `has_holes` until all came."""
        buffers = []
        for size in sizes:
            staged = self._end - self._start
            if size <= staged:  # small: aligning it would cost more than it saves
                data = self.take(size)
                assert data is not None  # it is staged
                buffers.append(np.frombuffer(data, np.uint8))
                continue
            buffer = aligned_empty(size)
            view = buffer.data
            view[:staged] = self._stage[self._start : self._end]
            self._start = self._end = 0
            self._holes.append(view[staged:])
            self.has_holes = True
            buffers.append(buffer)
        return buffers


def aligned_empty(size: int) -> np.ndarray:
    """Returns [size] uint8, not initialized, aligned for XLA to take without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size]
