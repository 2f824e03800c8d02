"""The integrity of frames: each has a tag of its payload and one of its head.

Plain frames have checksums, against damage. Sealed ones are encrypted and have MACs,
against people: see `security.seal`. Both ends of a connection have the same sort, one
object for each direction, since a seal counts frames.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import xxhash


class Integrity(Protocol):
    """The protection of the frames of one direction."""

    magic: bytes  # 4 bytes, the first of each frame
    tag_bytes: int
    what: str  # a name of the tags, for errors
    is_sealed: bool  # True if nobody on the way can read payloads, or make tags

    def next_frame(self) -> None:
        """Goes on to the next frame of its direction."""

    def head_tag(self, data: bytes) -> bytes:
        """Returns the tag of the present frame's head."""

    def protect(
        self, payload: Sequence[Any], in_clear: bool
    ) -> tuple[Sequence[Any], bytes]:
        """Returns byte buffers as they cross, `in_clear` as they are, and their tag."""

    def reveal(self, buffer: Any) -> None:
        """Makes the next part of a payload, in place, what `protect` was given."""

    def is_whole(self, payload: Sequence[Any], tag: bytes, in_clear: bool) -> bool:
        """Returns True if a tag is that of the present payload, which has been revealed
        unless it crossed in clear."""


class _Checksums:
    """The checksums: XXH3 of 64 bits. No protection against people."""

    magic, tag_bytes, what, is_sealed = b"NEBL", 8, "checksum", False

    def next_frame(self) -> None:
        pass  # a checksum is that of its part alone

    def head_tag(self, data: bytes) -> bytes:
        return checksum((data,)).to_bytes(self.tag_bytes)

    def protect(
        self, payload: Sequence[Any], in_clear: bool
    ) -> tuple[Sequence[Any], bytes]:
        return payload, checksum(payload).to_bytes(self.tag_bytes)

    def reveal(self, buffer: Any) -> None:
        pass  # it is no secret

    def is_whole(self, payload: Sequence[Any], tag: bytes, in_clear: bool) -> bool:
        return checksum(payload).to_bytes(self.tag_bytes) == tag


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
