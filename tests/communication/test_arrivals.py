"""Values that no encoder makes are refused on arrival, whatever the codec."""

import functools

import jax
import numpy as np
import pytest

from nebula_jax.communication import arrivals, codecs, loopback
from nebula_jax.communication.wire import session

B, L = 4, 8
ARRAYS = {
    "h": np.random.RandomState(0).randn(B, L, 8).astype(np.float32),
    "ids": np.arange(B * L, dtype=np.int32).reshape(B, L),
    "index": np.arange(B, dtype=np.int32),
    "mask": np.arange(L) < np.array([[2], [1], [3], [2]]),
}


@functools.cache
def sent(codec: str):
    """The receiving end of a channel, its line, and ARRAYS as they cross."""
    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ARRAYS)
    made, loop = codecs.from_string(codec), loopback.Loopback()
    sender = loop.sender("hidden", spec, made)
    receiver = loop.receiver("hidden", spec, made)
    sender.send(1, ARRAYS, 1)
    return receiver, loop, loop.take_tensor(0, "hidden")


def after(codec: str, buffer: int, tampered: bytes):
    """Receives ARRAYS with the first bytes of one buffer replaced; a payload."""
    receiver, loop, message = sent(codec)
    buffers = [np.array(each) for each in message.buffers]
    buffers[buffer][: len(tampered)] = np.frombuffer(tampered, np.uint8)
    loop.put_tensor(message._replace(buffers=buffers))
    return receiver.recv_payload(1, 1)


PACKED = "pack_tokens(mask, 2)|pack_ids(40)"


def f32(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("codec", "buffer", "good", "bad", "words"),
    [
        ("identity", 3, bytes([0, 1]), bytes([1, 2]), r"mask: 2 is not in \[0, 2\)"),
        # 6 bits an id: the lowest of the first byte.
        (PACKED, 1, b"\x27", b"\x28", r"ids/values: 40 is not in"),
        ("pack_ids(40)", 2, b"\x27", b"\x3f", r"index: 63 is not in \[0, 40\)"),
        (
            PACKED,
            3,
            bytes([255, 255, 0, 0]),
            bytes([255, 255, 1, 0]),
            "mask: 17 positions are real; at most 16 can be",
        ),
        # 2 of 256 values, at 8 bits each.
        ("sparse_loco(2, 256)", 0, bytes([7, 255]), bytes([255, 7]), "do not ascend"),
        ("sparse_loco(2, 256)", 0, bytes([7, 8]), bytes([7, 7]), "do not ascend"),
        ("int8(tensor)", 1, f32(np.nan), f32(-1.0), "h: -1.0 is no scale"),
        ("int8(tensor)", 1, f32(0.0), f32(np.inf), "h: inf is no scale"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_named(codec, buffer, good, bad, words):
    after(codec, buffer, good)
    with pytest.raises(session.RemoteProtocolError, match=words) as error:
        after(codec, buffer, bad)
    start = "this process sent hidden for step 1, micro-batch 1, that cannot be: "
    assert str(error.value).startswith(start)


def test_an_experiments_own_check_is_of_the_arrays():
    spec = jax.ShapeDtypeStruct((3,), np.int32)
    loop = loopback.Loopback()

    def check(array):
        arrivals.check_range(array, 1, 9)

    sender = loop.sender("lengths", spec, codecs.identity())
    receiver = loop.receiver("lengths", spec, codecs.identity(), check=check)
    sender.send(1, np.array([1, 8, 5], np.int32))
    sender.send(2, np.array([1, 0, 5], np.int32))
    assert receiver.recv(1).tolist() == [1, 8, 5]
    words = r"sent lengths for step 2, .*: 0 is not in \[1, 9\)"
    with pytest.raises(session.RemoteProtocolError, match=words):
        receiver.recv(2)
