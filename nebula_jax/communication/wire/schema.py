"""What a peer may send: no memory is taken for anything else."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.communication.wire import frames, receive_buffer

TABLE_ENTRY_BYTES = 8  # a length in the table of a compressed tensor


class Channel(NamedTuple):
    """What may come on a channel."""

    options: tuple[tuple[int, ...], ...]
    """For each shape that the codec offers, the size of each buffer in bytes."""
    is_compressed: bool
    """Whether sizes are limits, and a table of the true ones comes first."""


class Plan:
    """The channels of one direction, and the limits of all other messages."""

    def __init__(self):
        self.channels: list[Channel] = []

    def add(self, options: Sequence[Sequence[int]], is_compressed: bool) -> int:
        """Adds a channel; returns its number.

        Raises:
          ValueError: if a table of its buffers' lengths would not fit on the stage.
        """
        table_bytes = TABLE_ENTRY_BYTES * max(map(len, options))
        if is_compressed and table_bytes > receive_buffer.STAGE_BYTES // 2:
            raise ValueError("too many buffers in a tensor to compress")
        self.channels.append(Channel(tuple(map(tuple, options)), is_compressed))
        return len(self.channels) - 1

    def message_sizes(self, head: frames.Head) -> Sequence[int]:
        """The sizes of the payload's buffers of a message that is no tensor.

        Raises:
          ValueError: if it is too large.
        """
        limits = {
            frames.Hello: frames.MAX_HELLO_BYTES,
            frames.Abort: frames.MAX_REASON_BYTES,
        }
        limit = limits.get(head.kind, 0)
        if head.payload_bytes > limit:
            raise ValueError(
                f"sent {head.kind.__name__} with a payload of {head.payload_bytes}"
                f" bytes; at most {limit}"
            )
        return (head.payload_bytes,) if head.kind in limits else ()

    def tensor_sizes(
        self, head: frames.Head, header: bytes, parts: receive_buffer.Assembly
    ) -> tuple[int, Sequence[int] | None]:
        """Bytes of the table before a tensor's buffers, and the sizes of these.

        Args:
          head: of the frame.
          header: its typed header.
          parts: with the header, and what follows, on its stage.

        Returns:
          The sizes are None if the table is not there yet.

        Raises:
          ValueError: if it is not as planned.
        """
        channel, _, _, option = frames.Tensor.LAYOUT.unpack(header)
        if channel >= len(self.channels):
            raise ValueError(
                f"sent a tensor on channel {channel}; {len(self.channels)} channels are"
                " agreed"
            )
        options, is_compressed = self.channels[channel]
        if option >= len(options):
            raise ValueError(
                f"sent option {option} on channel {channel}; {len(options)} are agreed"
            )
        sizes, table_bytes = options[option], 0
        if is_compressed:
            table_bytes = TABLE_ENTRY_BYTES * len(sizes)
            staged = parts.peek(len(header) + table_bytes)
            if staged is None:
                return table_bytes, None
            limits = sizes
            sizes = np.frombuffer(bytes(staged[len(header) :]), ">u8").tolist()
            if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
                raise ValueError(
                    f"sent a table on channel {channel} that exceeds the plan"
                )
        planned = table_bytes + sum(sizes)
        if head.payload_bytes != planned:
            raise ValueError(
                f"sent {head.payload_bytes} bytes on channel {channel}; the plan says"
                f" {planned}"
            )
        return table_bytes, sizes
