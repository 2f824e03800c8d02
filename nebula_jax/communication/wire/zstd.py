"""Lossless compression of a payload's bytes, on the host (zstd).

A codec's payload has a fixed size, but its bytes need not be equally likely: int8 of
hidden states shrinks by another tenth to half. Received buffers are never larger than
the schema permits, whatever a frame claims.

A tensor of a compressed channel crosses as a table, the length of each buffer as a
big-endian uint64, the table's checksum, and the buffers. Codecs have no part in it: a
channel compresses, and its link adds the table and takes it off.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from nebula_jax import errors
from nebula_jax.communication.wire import frames, integrity, receive_buffer

WORTH_IT = 0.95  # of the bytes: above, coding costs more time than it saves
LONGEST_REST = 64  # tensors until a buffer that did not shrink is tried again
MAX_WINDOW = 8 << 20  # bytes that a decoder keeps: level 19 needs no more


class EntropyError(errors.NebulaError):
    """A buffer of the peer that does not decode to the schema's size."""


def with_table(buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns lengths and their checksum, [8 * buffers + 8] uint8, and the buffers."""
    lengths = np.array([len(each) for each in buffers], ">u8").tobytes()
    total = frames.CHECKSUM.pack(integrity.checksum((lengths,)))
    return [np.frombuffer(lengths + total, np.uint8), *buffers]


class Compressor:
    """The sending end of a channel; it treats each of a tensor's buffers by itself."""

    def __init__(self, level: int) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level)
        self._rest: dict[tuple[int, int], int] = {}  # tensors to go without trying
        self._next_rest: dict[tuple[int, int], int] = {}

    def compress(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns each buffer, compressed or as it is.

        A buffer that does not shrink below WORTH_IT rests for 1, 2, 4, ... tensors, so
        that compression in vain costs next to nothing. [n] uint8 each.
        """
        return [self._coded(index, each) for index, each in enumerate(buffers)]

    def _coded(self, index: int, buffer: np.ndarray) -> np.ndarray:
        key = (index, len(buffer))
        if self._rest.get(key, 0) > 0:
            self._rest[key] -= 1
            return buffer
        coded = self._zstd.compress(buffer.data)
        if len(coded) < WORTH_IT * len(buffer):
            self._next_rest[key] = 1
            return np.frombuffer(coded, np.uint8)
        rest = self._next_rest.get(key, 1)
        self._rest[key] = rest
        self._next_rest[key] = min(2 * rest, LONGEST_REST)
        return buffer


class Decompressor:
    """The receiving end of a channel, for all levels."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)

    def decompress(
        self, buffers: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> list[np.ndarray]:
        """Returns the buffers as they were, [size] uint8 each, aligned for the device.

        They come without the table; one of full size is not compressed. Raises
        EntropyError if one decodes to more or less than its size, or not at all.
        """
        return [
            buffer if len(buffer) == size else self._decoded(buffer, size)
            for buffer, size in zip(buffers, sizes, strict=True)
        ]

    def _decoded(self, buffer: np.ndarray, size: int) -> np.ndarray:
        # Not `decompress(max_output_size=)`: it trusts the size that the bytes claim.
        out = receive_buffer.aligned_empty(size)
        count, view = 0, out.data
        try:
            with self._zstd.stream_reader(
                buffer.data, read_across_frames=False
            ) as reader:
                while count < size and (read := reader.readinto(view[count:])):
                    count += read
                surplus = reader.read(1)
        except zstandard.ZstdError as error:
            raise EntropyError(f"sent bytes that zstd cannot decode: {error}") from None
        if count < size or surplus:
            raise EntropyError(
                f"sent {'more' if surplus else 'fewer'} bytes than the expected {size}"
            )
        return out
