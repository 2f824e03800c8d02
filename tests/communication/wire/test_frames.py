import numpy as np
import pytest

from nebula_jax.communication.wire import frames

NUMBERS = bytes(7) + b"\x05" + bytes(7) + b"\x09"  # sequence 5, 9 frames acknowledged

LITERAL = {
    frames.StepDone(7): b"NEBL\x02\x03\x00\x08"
    + NUMBERS
    + bytes(8)
    # header: the step
    + bytes(7)
    + b"\x07",
    frames.Ping(): b"NEBL\x02\x05\x00\x00" + NUMBERS + bytes(8),
    frames.Abort("no"): b"NEBL\x02\x07\x00\x00" + NUMBERS + bytes(7) + b"\x02no",
    frames.Open(b"sixteen bytes id", 3): b"NEBL\x02\x08\x00\x14"
    + NUMBERS
    + bytes(8)
    + b"sixteen bytes id\x00\x00\x00\x03",
}


@pytest.mark.parametrize(("message", "literal"), LITERAL.items())
def test_frames_are_these_bytes(message, literal):
    assert b"".join(frames.encode(message, sequence=5, acknowledged=9)) == literal
    head = frames.decode_head(literal[: frames.HEAD.size])
    header_bytes = frames.LAYOUTS[type(message)].size
    header = literal[frames.HEAD.size :][:header_bytes]
    payload = literal[frames.HEAD.size + header_bytes :]
    assert (head.sequence, head.acknowledged) == (5, 9)
    assert head.payload_bytes == len(payload)
    assert frames.decode(head, header, [payload]) == message


TENSOR_HEADER = b"\x00\x01" + bytes(7) + b"\x02" + b"\x00\x00\x00\x03" + b"\x04"


def test_a_large_tensors_buffers_are_passed_on_without_a_copy():
    ids = np.zeros(frames.JOINED_BYTES + 1, np.uint8)
    head, buffer = frames.encode(frames.Tensor(1, 2, 3, [ids], option=4), 0, 0)
    assert np.shares_memory(np.asarray(buffer), ids)
    assert head == (b"NEBL\x02\x02\x00\x0f" + bytes(22) + b"\x10\x01" + TENSOR_HEADER)


def test_a_small_tensor_leaves_in_one_piece():
    ids = np.arange(6, dtype=np.uint8)
    (frame,) = frames.encode(frames.Tensor(1, 2, 3, [ids, ids], option=4), 0, 0)
    assert frame == (
        b"NEBL\x02\x02\x00\x0f" + bytes(23) + b"\x0c" + TENSOR_HEADER + bytes(ids) * 2
    )


def test_hello_comes_back_equal():
    hello = frames.Hello("generator:0", "0.1", {"steps": 5, "λ": [1.5]}, (10, 20))
    (frame,) = frames.encode(hello, 0, 0)
    head = frames.decode_head(frame[: frames.HEAD.size])
    assert frames.decode(head, b"", [frame[frames.HEAD.size :]]) == hello


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost:", "begins no frame"),
        (b"NEBL\x01\x05\x00\x00" + bytes(24), "frame version 1; this is version 2"),
        (b"NEBL\x02\x63\x00\x00" + bytes(24), "unknown kind 99"),
        (b"NEBL\x02\x05\x00\x04" + bytes(24), "Ping with a header of 4 bytes"),
    ],
)
def test_strange_heads_are_refused_in_words(data, words):
    with pytest.raises(frames.FrameError, match=words):
        frames.decode_head(data)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b"[" * 60_000,
        b'{"cluster":1,"version":"","settings":{},"checkpoints":[],"details":{}}',
        b'{"cluster":"","version":"","settings":[],"checkpoints":[],"details":{}}',
        b'{"cluster":"","version":"","settings":{},"checkpoints":["1"],"details":{}}',
        b'{"cluster":"","version":"","settings":{},"checkpoints":[-1],"details":{}}',
        b'{"cluster":"","version":"","settings":{},"checkpoints":[],"details":{},"x":1}',
    ],
)
def test_strange_hellos_are_refused(payload):
    head = frames.Head(frames.Hello, 0, 0, len(payload))
    with pytest.raises(frames.FrameError, match="Hello"):
        frames.decode(head, b"", [payload])


def test_an_oversized_hello_is_not_even_sent():
    hello = frames.Hello("a", "b", {"x": "y" * frames.MAX_HELLO_BYTES})
    with pytest.raises(frames.FrameError, match="at most"):
        frames.encode(hello, 0, 0)
