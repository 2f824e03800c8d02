"""The parser, given the same bytes in different pieces."""

import struct

import pytest
import xxhash

from nebula_jax.communication.wire import frames, reader, receive_buffer, zstd

STAGE, LARGE = 512, 600  # bytes: a large buffer is more than the stage has
MESSAGES = [
    frames.Open(b"sixteen bytes id", 3),
    frames.Hello("generator:0", "0.1", {"steps": 5}),
    frames.Welcome(7),
    frames.Tensor(0, 1, 2, [b"abc", b"", b"defgh"]),
    frames.Tensor(0, 1, 3, [b"xy"], 1),
    frames.Tensor(1, 1, 0, zstd.with_table([b"ab", b"cdef"])),
    frames.Tensor(2, 1, 0, [bytes(range(200)) * 3, b"end"]),
    frames.StepDone(1),
    frames.Abort("why"),
]


@pytest.fixture(autouse=True)
def stage(monkeypatch):
    monkeypatch.setattr(receive_buffer, "STAGE_BYTES", STAGE)


def made_schema():
    made = reader.Schema()
    made.add([[3, 0, 5], [2]], is_compressed=False)
    made.add([[2, 100]], is_compressed=True)
    made.add([[LARGE, 3]], is_compressed=False)
    return made


def joined(message, sequence=0):
    parts = frames.encode(message, sequence, 0)
    return b"".join(bytes(part) for part in parts)


def parsed(pieces):
    """What the reader makes of bytes that come in these pieces."""
    heads, found = [], []
    buffer = receive_buffer.ReceiveBuffer()
    reading = reader.read(buffer, made_schema(), heads.append)
    for piece in pieces:
        piece = memoryview(piece)
        while len(piece):
            view = buffer.get_buffer()
            count = min(len(view), len(piece))
            view[:count] = piece[:count]
            buffer.receive(count)
            piece = piece[count:]
            while (received := next(reading)) is not None:
                found.append(received)
    return heads, found


def plain(message, has_table=False):
    if not isinstance(message, frames.Tensor):
        return message
    buffers = [bytes(each) for each in message.buffers]
    return message._replace(buffers=buffers[1:] if has_table else buffers)


EXPECTED = [
    plain(message, isinstance(message, frames.Tensor) and message.channel == 1)
    for message in MESSAGES
]
STREAM = b"".join(map(joined, MESSAGES))
SIZES = [len(joined(message)) for message in MESSAGES]


def test_every_frame_comes_out_as_it_went_in():
    heads, found = parsed([STREAM])
    assert [plain(each[0]) for each in found] == EXPECTED
    assert [each[1] for each in found] == SIZES
    assert [head.kind for head in heads] == [type(each) for each in MESSAGES]


def test_a_stream_may_be_split_at_every_byte():
    for position in range(1, len(STREAM)):
        _, found = parsed([STREAM[:position], STREAM[position:]])
        assert [plain(each[0]) for each in found] == EXPECTED, position


@pytest.mark.parametrize("size", [1, 33])
def test_a_stream_may_come_in_pieces_of_any_size(size):
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    _, found = parsed(pieces)
    assert [plain(each[0]) for each in found] == EXPECTED


@pytest.mark.parametrize("message", MESSAGES)
def test_no_message_comes_before_its_last_byte(message):
    _, found = parsed([joined(message)[:-1]])
    assert not found


HUGE = 2**63


def head_of(kind, payload_bytes):
    """A whole head and header that claim so many bytes, none of which follow."""
    number, size = frames.KINDS.index(kind), frames.LAYOUTS[kind].size
    fields = struct.pack("!4sBBHQQQQ", b"NEBL", 3, number, size, 0, 0, payload_bytes, 0)
    return fields + xxhash.xxh3_64_digest(fields + bytes(size)) + bytes(size)


def with_table(*sizes, follow):
    """A tensor whose table has these lengths; so many bytes follow."""
    lengths = struct.pack(f"!{len(sizes)}Q", *sizes)
    table = lengths + xxhash.xxh3_64_digest(lengths)
    return joined(frames.Tensor(1, 1, 0, [table, bytes(follow)]))


REFUSED = [
    (joined(frames.Tensor(3, 1, 0, [b"a"])), "channel 3; 3 channels are open"),
    (joined(frames.Tensor(0, 1, 0, [b"a"], 2)), "option 2 on channel 0; it has 2"),
    (joined(frames.Tensor(0, 1, 0, [b"a"])), "1 bytes on channel 0; expected 8"),
    (with_table(3, 4, follow=7), "exceeds the schema"),
    (with_table(2, HUGE, follow=2), "exceeds the schema"),
    (with_table(2, 4, follow=5), "29 bytes on channel 1; expected 30"),
    (head_of(frames.Abort, HUGE), "at most 4096"),
    (head_of(frames.Ping, 1), "at most 0"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_what_is_refused_is_refused_however_it_is_split(data, words):
    for position in range(1, len(data)):
        with pytest.raises(frames.FrameError, match=words):
            parsed([data[:position], data[position:]])


STRANGE = b"GET / HTTP/1.1\r\nHost: localhost: and more of the like"


def test_what_is_no_frame_is_damage_however_it_is_split():
    for position in range(1, len(STRANGE)):
        with pytest.raises(frames.Damaged, match="begins no frame"):
            parsed([STRANGE[:position], STRANGE[position:]])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_flipped_bit_anywhere_is_damage(message):
    """In the head, the typed header, the table of lengths and the payload."""
    whole = joined(message)
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        with pytest.raises(frames.Damaged):
            parsed([data, bytes(64)])  # if the head claims more: what comes next


def test_a_message_out_of_place_is_refused_by_its_head_and_header_alone():
    def refuse(head):
        raise ValueError(head.kind)

    buffer = receive_buffer.ReceiveBuffer()
    reading = reader.read(buffer, made_schema(), refuse)
    size = frames.frame_bytes(frames.Tensor)
    buffer.get_buffer()[:size] = joined(MESSAGES[6])[:size]
    buffer.receive(size)
    with pytest.raises(ValueError, match="Tensor"):
        next(reading)


def test_a_head_is_not_used_before_its_header_has_confirmed_it():
    heads = []
    data = bytearray(joined(frames.Tensor(0, 1, 0, [b"abc", b"", b"defgh"])))
    data[frames.head_bytes()] ^= 1
    buffer = receive_buffer.ReceiveBuffer()
    buffer.get_buffer()[: len(data)] = data
    buffer.receive(len(data))
    with pytest.raises(frames.Damaged, match="checksum of a head"):
        next(reader.read(buffer, made_schema(), heads.append))
    assert not heads


def test_a_large_buffer_is_where_xla_takes_it_without_a_copy():
    made = receive_buffer.ReceiveBuffer().place([LARGE])[0]
    assert made.ctypes.data % receive_buffer.ALIGNMENT == 0
    assert made.base.nbytes <= LARGE + receive_buffer.ALIGNMENT
