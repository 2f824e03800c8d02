"""The parser of a peer's bytes: the only one, and it takes nothing on trust.

No memory is taken for a message that the schema does not have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.communication.wire import frames, integrity, receive_buffer
from nebula_jax.communication.wire.integrity import CHECKSUMS, Integrity

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
    is_compressed: bool  # sizes are limits, and a table of the true ones comes first

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


def read(
    buffer: receive_buffer.ReceiveBuffer,
    allowed: Schema,
    admit: Callable[[frames.Head], None],
    tags: Integrity = CHECKSUMS,
) -> Iterator[tuple[frames.Message, int] | None]:
    """Reads one frame after the other, as code that waits for bytes would.

    `allowed`, what may come and how large, is read anew for every frame. `admit` gets
    each head, verified, before anything is done about it, and raises if the message is
    out of place. Yields a message with the bytes of its frame, or None when more are
    needed. Raises frames.Damaged if the bytes are not those that were sent;
    frames.FrameError if they are no frame that the schema allows.
    """
    sizes: Sequence[int]
    while True:
        while (data := buffer.take(frames.head_bytes(tags))) is None:
            yield None
        length = frames.header_bytes(data, tags)
        while (header := buffer.take(length)) is None:
            yield None
        head = frames.decode_head(data, header, tags)
        admit(head)
        table = bytearray()
        if head.kind is frames.Tensor:
            shape = allowed.shape(header)
            if shape.is_compressed:
                while (staged := buffer.take(shape.table_bytes)) is None:
                    yield None
                table = staged
                tags.reveal(table)
            sizes = _tensor_sizes(shape, head, table, tags)
        else:
            sizes = allowed.message_sizes(head)
        buffers = buffer.place(sizes)
        while buffer.has_holes:
            yield None
        if head.kind not in frames.IN_CLEAR:
            for each in buffers:
                tags.reveal(each)
        frames.verify_payload(head, [table, *buffers] if table else buffers, tags)
        message = frames.decode(head, header, buffers)
        size = frames.frame_bytes(head.kind, head.payload_bytes, tags)
        yield message, size


def _tensor_sizes(
    shape: Shape, head: frames.Head, table: bytearray, tags: Integrity
) -> Sequence[int]:
    """Returns the size of each buffer of a tensor, by its table if it has one."""
    sizes: Sequence[int] = shape.sizes
    try:
        if table:
            sizes = shape.table_sizes(table)
        expected = len(table) + sum(sizes)
        if head.payload_bytes != expected:
            raise frames.FrameError(
                f"sent {head.payload_bytes} bytes on channel {shape.channel};"
                f" expected {expected}"
            )
    except frames.FrameError as error:
        # Who carries a sealed frame may have changed its table: only the payload's MAC,
        # which needs all of it, shows that the peer is to blame.
        if table and tags.is_sealed:
            raise frames.Damaged(f"a table of lengths is wrong: {error}") from None
        raise
    return sizes


def read_opening(data: bytes, tags: Integrity = CHECKSUMS) -> tuple[frames.Open, int]:
    """Reads the first frame of a connection whose session is yet to be found.

    Returns it, and how many frames the connector acknowledges in it. Raises
    frames.Damaged if the bytes are not those that were sent, or no frame;
    frames.FrameError if it is something else.
    """
    heads: list[frames.Head] = []

    def admit(head: frames.Head) -> None:
        if head.kind is not frames.Open or head.sequence:
            raise frames.FrameError(f"sent {head.kind.__name__} before Open")
        heads.append(head)

    buffer = receive_buffer.ReceiveBuffer()
    buffer.get_buffer()[: len(data)] = data
    buffer.receive(len(data))
    received = next(read(buffer, Schema(), admit, tags))
    # `admit` lets nothing else through, and the data are all of it.
    assert received is not None
    assert isinstance(received[0], frames.Open)
    return received[0], heads[0].acknowledged
