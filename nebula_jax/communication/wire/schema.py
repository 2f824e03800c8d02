"""The messages that a peer may send: no memory is taken for anything else."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.communication.wire import frames, integrity, receive_buffer

TABLE_ENTRY_BYTES = 8  # a length in the table of a compressed tensor
PAYLOAD_LIMITS = {  # bytes; tensors have their channel's, other messages none
    frames.Hello: frames.MAX_HELLO_BYTES,
    frames.Abort: frames.MAX_REASON_BYTES,
    frames.Welcome: frames.MAX_WELCOME_BYTES,
}


class Shape(NamedTuple):
    """A shape of tensor that may come on a channel."""

    channel: int
    sizes: tuple[int, ...]  # bytes of each buffer
    is_compressed: bool
    """True if sizes are limits, and a table of the true ones comes first."""

    @property
    def table_bytes(self) -> int:
        """The length of the table and its checksum, if there is one."""
        return TABLE_ENTRY_BYTES * len(self.sizes) + frames.CHECKSUM.size

    def table_sizes(self, table: bytes | bytearray) -> list[int]:
        """Returns the sizes in a table.

        Raises frames.Damaged if its checksum is wrong; frames.FrameError if they exceed
        the limits.
        """
        *sizes, total = np.frombuffer(table, ">u8").tolist()
        if integrity.checksum((table[: -frames.CHECKSUM.size],)) != total:
            raise frames.Damaged("the checksum of a table of lengths is wrong")
        if any(size > limit for size, limit in zip(sizes, self.sizes, strict=True)):
            raise frames.FrameError(
                f"sent a table on channel {self.channel} that exceeds the schema"
            )
        return sizes


class Schema:
    """The channels of one direction, and the limits of all other messages."""

    def __init__(self) -> None:
        self._channels: list[list[Shape]] = []  # channel -> option

    def add(self, options: Sequence[Sequence[int]], is_compressed: bool) -> None:
        """Adds a channel: for each shape, the bytes of each buffer.

        Raises ValueError if a table of its buffers' lengths would not fit on the stage.
        """
        number = len(self._channels)
        shapes = [Shape(number, tuple(sizes), is_compressed) for sizes in options]
        most = max(shape.table_bytes for shape in shapes)
        if is_compressed and most > receive_buffer.STAGE_BYTES // 2:
            raise ValueError("too many buffers in a tensor to compress")
        self._channels.append(shapes)

    def message_sizes(self, head: frames.Head) -> Sequence[int]:
        """Returns a message's buffer sizes; raises frames.FrameError if too large."""
        limit = PAYLOAD_LIMITS.get(head.kind, 0)
        if head.payload_bytes > limit:
            raise frames.FrameError(
                f"sent {head.kind.__name__} with a payload of {head.payload_bytes}"
                f" bytes; at most {limit}"
            )
        return (head.payload_bytes,) if limit else ()

    def shape(self, header: bytes | bytearray) -> Shape:
        """Returns a tensor's shape by its header; frames.FrameError if it has none."""
        channel, _, _, option = frames.LAYOUTS[frames.Tensor].unpack(header)
        if channel >= len(self._channels):
            raise frames.FrameError(
                f"sent a tensor on channel {channel}; {len(self._channels)} channels"
                " are open"
            )
        if option == frames.STEP_END:
            return Shape(channel, (frames.IDENTITY_BYTES,), is_compressed=False)
        shapes = self._channels[channel]
        if option >= len(shapes):
            raise frames.FrameError(
                f"sent option {option} on channel {channel}; it has {len(shapes)}"
            )
        return shapes[option]
