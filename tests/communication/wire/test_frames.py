import dataclasses
import json
import struct

import numpy as np
import pytest
import xxhash

from nebula_jax import errors
from nebula_jax.communication.wire import activity, frames, integrity

NUMBERS = bytes(7) + b"\x05" + bytes(7) + b"\x09"  # sequence 5, 9 frames acknowledged


def xxh3(data):
    return xxhash.xxh3_64_digest(data)


def literal(first, header=b"", payload=b"", numbers=NUMBERS):
    """A frame, written down field by field."""
    length = struct.pack("!Q", len(payload))
    fields = b"NEBL\x03" + first + numbers + length + xxh3(payload)
    return fields + xxh3(fields + header) + header + payload


LITERAL = {
    frames.StepDone(7): literal(b"\x03\x00\x08", bytes(7) + b"\x07"),
    frames.Ping(activity.Activity.SAVING, 3, 9): literal(
        b"\x05\x00\x11", b"\x02" + bytes(7) + b"\x03" + bytes(7) + b"\x09"
    ),
    frames.Abort("no"): literal(b"\x07\x00\x00", payload=b"no"),
    frames.Open(b"sixteen bytes id", 3): literal(
        b"\x08\x00\x14", b"sixteen bytes id\x00\x00\x00\x03"
    ),
}


@pytest.mark.parametrize(("message", "expected"), LITERAL.items())
def test_frames_are_these_bytes(message, expected):
    assert b"".join(frames.encode(message, sequence=5, acknowledged=9)) == expected
    start = expected[: frames.head_bytes()]
    length = frames.header_bytes(start)
    header = expected[frames.head_bytes() :][:length]
    payload = expected[frames.head_bytes() + length :]
    head = frames.decode_head(start, header)
    frames.verify_payload(head, [payload])
    assert (head.sequence, head.acknowledged) == (5, 9)
    assert head.payload_bytes == len(payload)
    assert frames.decode(head, header, [payload]) == message
    assert frames.frame_bytes(type(message), len(payload)) == len(expected)


def crossed(message):
    """A message as its receiver decodes it."""
    frame = b"".join(map(bytes, frames.encode(message, 0, 0)))
    start, rest = frame[: frames.head_bytes()], frame[frames.head_bytes() :]
    size = frames.header_bytes(start)
    head = frames.decode_head(start, rest[:size])
    return frames.decode(head, rest[:size], [rest[size:]] if rest[size:] else ())


def test_a_step_and_a_hello_may_be_as_large_as_any_runs():
    for message in (
        frames.StepDone(2**32),
        frames.Hello("d", "1", {"--text": "x" * 60_000}, checkpoints=(1, 2**32)),
    ):
        assert crossed(message) == message


def test_buffers_have_one_checksum_however_they_are_divided():
    parts = [b"ab", b"", np.arange(9, dtype=np.uint8), bytearray(5000)]
    whole = b"".join(bytes(part) for part in parts)
    assert integrity.checksum(parts) == integrity.checksum([whole])
    assert integrity.checksum([]) == integrity.checksum([b""])


TENSOR_HEADER = b"\x00\x01" + bytes(7) + b"\x02" + b"\x00\x00\x00\x03" + b"\x04"
ZEROS = bytes(16)


def test_a_large_tensors_buffers_are_passed_on_without_a_copy():
    ids = np.zeros(frames.JOINED_BYTES + 1, np.uint8)
    head, buffer = frames.encode(frames.Tensor(1, 2, 3, [ids], option=4), 0, 0)
    assert np.shares_memory(np.asarray(buffer), ids)
    assert head + bytes(ids) == literal(
        b"\x02\x00\x0f", TENSOR_HEADER, bytes(ids), numbers=ZEROS
    )


def test_a_small_tensor_leaves_in_one_piece():
    ids = np.arange(6, dtype=np.uint8)
    (frame,) = frames.encode(frames.Tensor(1, 2, 3, [ids, ids], option=4), 0, 0)
    assert frame == literal(
        b"\x02\x00\x0f", TENSOR_HEADER, bytes(ids) * 2, numbers=ZEROS
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost: and more of the like", "begins no frame"),
        (b"NEBL\x02\x05\x00\x00" + bytes(40), "version 2; this is version 3"),
        (b"NEBL\x03\x63\x00\x00" + bytes(40), "of kind 99"),
        (b"NEBL\x03\x05\x00\x04" + bytes(40), "of kind 5 with a header of 4 bytes"),
    ],
)
def test_what_is_no_head_is_damage_in_words(data, words):
    with pytest.raises(frames.Damaged, match=words):
        frames.header_bytes(data)


HELLO = {"cluster": "a", "version": "", "settings": {}, "details": {}}
HELLO |= {"checkpoints": []}
STRANGE = [
    *({"cluster": 1}, {"cluster": ""}, {"version": 1}, {"details": []}, {"x": 1}),
    *({"settings": []}, {"settings": {"a": float("nan")}}),
    *({"checkpoints": [each]} for each in (True, 0, "1", -1, 2**32 + 1)),
]


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xff", b"[]", b"null", b"{}", b"[" * 60_000),
        *(json.dumps(HELLO | each).encode() for each in STRANGE),
    ],
)
def test_strange_hellos_are_refused(payload):
    head = frames.Head(frames.Hello, 0, 0, len(payload), 0)
    with pytest.raises(frames.FrameError, match="Hello"):
        frames.decode(head, b"", [payload])


@pytest.mark.parametrize(
    "value",
    [np.int64(3), np.ones(2), (1, 2), [(1, 2)], {1: "a"}, float("nan"), b"bytes"],
    ids=repr,
)
def test_a_value_that_would_not_come_back_from_json_is_named(value):
    words = rf"--sizes is .* \({type(value).__name__}\), which a Hello cannot carry"
    for given in ({"--sizes": value}, {}), ({}, {"--sizes": value}):
        with pytest.raises(errors.SettingsError, match=words):
            frames.Hello("a", "b", given[0], details=given[1])


def test_an_oversized_hello_is_not_even_sent():
    hello = frames.Hello("a", "b", {"x": "y" * frames.MAX_HELLO_BYTES})
    with pytest.raises(frames.FrameError, match="at most"):
        frames.encode(hello, 0, 0)


def test_a_ping_with_an_activity_that_does_not_exist_is_refused():
    head = frames.Head(frames.Ping, 0, 0, 0, 0)
    with pytest.raises(frames.FrameError, match="a Ping with unknown activity 6"):
        frames.decode(head, b"\x06" + bytes(16), [])


MESSAGES = (
    frames.Tensor(1, 2, 3, (), option=4),
    frames.Welcome(2, b"channels"),
    frames.StepDone(2),
    frames.Stop(2),
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_step_beyond_all_runs_is_refused_where_it_arrives(message):
    """Whatever uses it next may count in fewer bits."""

    def at(step):
        if isinstance(message, frames.Tensor):
            return message._replace(step=step)
        return dataclasses.replace(message, step=step)

    assert crossed(at(frames.MAX_STEP)) == at(frames.MAX_STEP)
    for step in (frames.MAX_STEP + 1, 2**63, 2**64 - 1):
        words = f"sent a {type(message).__name__} of step {step}; there is none"
        with pytest.raises(frames.FrameError, match=words):
            crossed(at(step))
