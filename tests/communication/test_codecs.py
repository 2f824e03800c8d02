import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.communication import codec, codecs


def bits_of(values, bits):
    """The oracle: numpy's own bit packing, least significant bit first."""
    values = np.asarray(values).reshape(-1, 1).astype(np.uint64)
    table = (values >> np.arange(bits, dtype=np.uint64)) & 1
    return np.packbits(table.astype(np.uint8).reshape(-1), bitorder="little")


@pytest.mark.parametrize("vocab_size", [2, 3, 256, 4000, 65_536, 250_002, 2**31 - 1])
@pytest.mark.parametrize("shape", [(1,), (31,), (32,), (4, 19), (3, 5, 7)])
def test_packed_ids_equal_numpy_bit_packing_and_come_back(vocab_size, shape):
    ids = np.random.RandomState(0).randint(0, vocab_size, shape).astype(np.int32)
    ids.flat[0], ids.flat[-1] = 0, vocab_size - 1
    bits = codecs.bits_for(vocab_size)
    pack = codecs.pack_ids(vocab_size)
    payload, state = jax.jit(pack.encode)(ids, pack.init(ids))
    np.testing.assert_array_equal(payload.data, bits_of(ids, bits))
    assert payload.data.size == -(-ids.size * bits // 8)
    decoded, _ = jax.jit(pack.decode)(payload, state)
    np.testing.assert_array_equal(decoded, ids)
    assert decoded.dtype == jnp.int32


def test_booleans_take_one_bit():
    marks = np.random.RandomState(1).rand(4, 33) < 0.15
    pack = codecs.pack_ids(4000)
    payload, state = pack.encode(marks, ())
    np.testing.assert_array_equal(payload.data, np.packbits(marks, bitorder="little"))
    decoded, _ = pack.decode(payload, state)
    np.testing.assert_array_equal(decoded, marks)


def test_the_papers_vocabulary_takes_18_bits():
    assert codecs.bits_for(250_002) == 18
    spec = jax.ShapeDtypeStruct((2048, 512), jnp.int32)
    assert codec.ratio(codecs.pack_ids(250_002), spec) == 18 / 32


def test_receiver_rebuilds_the_payload_from_the_spec_and_bare_buffers():
    arrays = {"ids": np.arange(12, dtype=np.int32), "marks": np.ones(9, bool)}
    pack = codecs.pack_ids(20)
    payload, _ = jax.jit(pack.encode)(arrays, ())
    buffers = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    planned = codec.payload_spec(pack, spec)
    leaves = [
        np.frombuffer(buffer, leaf.dtype).reshape(leaf.shape)
        for buffer, leaf in zip(buffers, jax.tree.leaves(planned), strict=True)
    ]
    decoded, _ = pack.decode(
        jax.tree.unflatten(jax.tree.structure(planned), leaves), ()
    )
    jax.tree.map(np.testing.assert_array_equal, decoded, arrays)


def test_identity_sends_arrays_as_they_are():
    spec = {"h": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    assert codec.nbytes(spec) == 24
    assert codec.ratio(codec.identity(), spec) == 1.0
