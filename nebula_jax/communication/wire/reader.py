"""The parser of a peer's bytes: the only one, and it takes nothing on trust."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nebula_jax.communication.wire import frames, receive_buffer, schema
from nebula_jax.communication.wire.integrity import CHECKSUMS, Integrity


class Received(NamedTuple):
    """A whole message."""

    message: frames.Message
    nbytes: int  # bytes of its frame


def read(
    buffer: receive_buffer.ReceiveBuffer,
    allowed: schema.Schema,
    admit: Callable[[frames.Head], None],
    tags: Integrity = CHECKSUMS,
) -> Iterator[Received | None]:
    """Reads one frame after the other, as code that waits for bytes would.

    `allowed`, what may come and how large, is read anew for every frame. `admit` gets
    each head, verified, before anything is done about it, and raises if the message is
    out of place. Yields a message, or None when more bytes are needed. Raises
    frames.Damaged if the bytes are not those that were sent; frames.FrameError if they
    are no frame that the schema allows.
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
        yield Received(message, size)


def _tensor_sizes(
    shape: schema.Shape, head: frames.Head, table: bytearray, tags: Integrity
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
    received = next(read(buffer, schema.Schema(), admit, tags))
    # `admit` lets nothing else through, and the data are all of it.
    assert received is not None
    assert isinstance(received.message, frames.Open)
    return received.message, heads[0].acknowledged
