"""Codecs over a link: options, state, lossless coding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
import zstandard

from nebula_jax.communication import codec, codecs, loopback, selector
from nebula_jax.communication.wire import session, zstd


def ends(spec, codec):
    loop = loopback.Loopback()
    return loop, loop.sender("h", spec, codec), loop.receiver("h", spec, codec)


def halves_or_whole():
    """A codec of two shapes: the first half alone where the rest is zeros."""

    def option(size):
        return codec.Codec(
            init=lambda spec: jnp.zeros((), jnp.int32),
            encode=lambda x, n: (x[:size], n + 1),
            decode=lambda x, n: (jnp.pad(x, (0, 8 - size)), n + 1),
        )

    return selector.Selector(
        (option(4), option(8)), lambda x, state, step: int(np.any(np.asarray(x)[4:]))
    )


def test_the_option_chosen_by_the_sender_is_the_one_that_is_decoded():
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    loop, sender, receiver = ends(spec, halves_or_whole())
    short = np.array([1, 2, 3, 4, 0, 0, 0, 0], np.float32)
    whole = np.arange(8, dtype=np.float32)
    for step, array in enumerate((short, whole, short)):
        sender.send(step, array)
        assert sum(map(len, loop.arrived(0).buffers)) == (32 if array is whole else 16)
        np.testing.assert_array_equal(receiver.recv(step), array)
    assert int(sender.state) == int(receiver.state) == 3


SPEC = {
    "even": jax.ShapeDtypeStruct((5000,), jnp.int32),
    "noise": jax.ShapeDtypeStruct((5000,), jnp.float32),
}


def arrays(seed):
    random = np.random.RandomState(seed)
    noise = random.randint(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    return {"even": np.arange(5000, dtype=np.int32) // 100, "noise": noise}


def test_lossless_coding_gives_back_every_bit_and_leaves_noise_alone():
    loop, sender, receiver = ends(SPEC, codecs.zstd(1))
    for step in range(4):
        sender.send(step, arrays(step))
        even, noise = loop.arrived(0).buffers
        assert len(even) < 2000
        assert len(noise) == 20_000
        received = receiver.recv(step)
        for name, array in arrays(step).items():
            assert np.asarray(received[name]).tobytes() == array.tobytes()


def test_the_table_of_lengths_is_big_endian_and_comes_first():
    buffers = [np.zeros(3, np.uint8), np.ones(300, np.uint8)]
    table, *rest = zstd.with_table(buffers)
    lengths = bytes.fromhex("0000000000000003 000000000000012c")
    assert table.tobytes() == lengths + xxhash.xxh3_64_digest(lengths)
    assert all(a is b for a, b in zip(rest, buffers, strict=True))


def test_a_buffer_that_does_not_shrink_is_tried_ever_more_rarely():
    compressor, tried = zstd.Compressor(1), []
    compress = compressor._zstd.compress

    class Counted:
        def compress(self, buffer):
            tried.append(len(buffer))
            return compress(buffer)

    compressor._zstd = Counted()
    noise = np.random.RandomState(0).bytes(4096)
    for _ in range(200):
        compressor.compress([np.frombuffer(noise, np.uint8)])
    assert 5 <= len(tried) <= 10


@pytest.mark.parametrize(
    ("coded", "words"),
    [
        (zstandard.compress(bytes(1001)), "more bytes than the expected 1000"),
        (zstandard.compress(bytes(1 << 26)), "more bytes than the expected 1000"),
        (zstandard.compress(bytes(999)), "fewer bytes than the expected 1000"),
        (zstandard.compress(bytes(1000))[:-3], "zstd|fewer"),
        (b"neither zstd nor anything", "zstd cannot decode"),
        (b"", "fewer"),
    ],
)
def test_bytes_that_do_not_decode_to_the_plan_are_refused(coded, words):
    with pytest.raises(zstd.EntropyError, match=words):
        zstd.Decompressor().decompress([np.frombuffer(coded, np.uint8)], [1000])


def test_the_receiver_names_who_sent_what_cannot_be_decoded():
    loop, sender, receiver = ends(SPEC, codecs.zstd(1))
    sender.send(3, arrays(0))
    message = loop.arrived(0)
    message.buffers[1] = np.frombuffer(b"x" * 50, np.uint8)
    words = "this process sent bytes that zstd cannot decode: .*, as h of step 3"
    with pytest.raises(session.RemoteProtocolError, match=words):
        receiver.recv(3)
