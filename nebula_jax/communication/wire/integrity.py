"""The integrity of frames: each has a tag of its payload and one of its head.

Plain frames have checksums, against damage. Sealed ones have MACs, against people: see
`security.seal`. Both ends of a connection have the same sort, one object for each
direction, since a MAC counts frames.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

PAYLOAD, HEAD = 0, 1
"""The parts of a frame that have a tag."""


class Integrity(Protocol):
    """The tags of the frames of one direction."""

    magic: bytes
    """4 bytes, the first of each frame."""
    tag_bytes: int
    what: str
    """A name of the tags, for errors."""

    def next_frame(self) -> None:
        """Goes on to the next frame of its direction."""

    def tag(self, part: int, buffers: Sequence[Any]) -> bytes:
        """Returns the tag of a part of the present frame, as if it were one buffer."""

    def fits(self, part: int, buffers: Sequence[Any], tag: bytes) -> bool:
        """Returns True if a tag is that of a part of the present frame."""


class _Checksums:
    """The checksums: XXH3 of 64 bits. No protection against people."""

    magic, tag_bytes, what = b"NEBL", 8, "checksum"

    def next_frame(self) -> None:
        """Does nothing: a checksum is that of its part alone."""

    def tag(self, part: int, buffers: Sequence[Any]) -> bytes:
        """Returns the checksum of buffers, as if they were one."""
        return checksum(buffers).to_bytes(self.tag_bytes)

    def fits(self, part: int, buffers: Sequence[Any], tag: bytes) -> bool:
        """Returns True if a tag is the checksum of buffers."""
        return self.tag(part, buffers) == tag


CHECKSUMS = _Checksums()


class Both(NamedTuple):
    """The integrity of both directions of a connection, as one end has it."""

    sent: Integrity
    received: Integrity


PLAIN = Both(CHECKSUMS, CHECKSUMS)


def checksum(buffers: Sequence[Any]) -> int:
    """Returns the checksum of buffers, as if they were one."""
    if len(buffers) == 1:  # mostly; four times as fast where it is small
        return xxhash.xxh3_64_intdigest(buffers[0])
    total = xxhash.xxh3_64()
    for buffer in buffers:
        total.update(buffer)
    return total.intdigest()
