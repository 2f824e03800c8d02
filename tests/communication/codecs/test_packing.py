import functools
from typing import NamedTuple

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from nebula_jax.communication import codecs, selector
from nebula_jax.communication.codecs import bits as bits_lib


def bits_of(values, bits):
    """The oracle: numpy's own bit packing, least significant bit first."""
    values = np.asarray(values).reshape(-1, 1).astype(np.uint64)
    table = (values >> np.arange(bits, dtype=np.uint64)) & 1
    return np.packbits(table.astype(np.uint8).reshape(-1), bitorder="little")


@pytest.mark.parametrize("vocab_size", [250_002, 2**31 - 1])
def test_packed_ids_equal_numpy_bit_packing_and_come_back(vocab_size):
    random = np.random.RandomState(0)
    several = [
        random.randint(0, vocab_size, shape).astype(np.int32)
        for shape in ((1,), (32,), (3, 5, 7))
    ]
    for ids in several:
        ids.flat[0], ids.flat[-1] = 0, vocab_size - 1
    bits = codecs.bits_for(vocab_size)
    pack = codecs.pack_ids(vocab_size)
    payloads, state = jax.jit(pack.encode)(several, pack.init(several))
    decoded, _ = jax.jit(pack.decode)(payloads, state)
    for ids, payload, got in zip(several, payloads, decoded, strict=True):
        np.testing.assert_array_equal(payload.data, bits_of(ids, bits))
        assert payload.data.size == -(-ids.size * bits // 8)
        np.testing.assert_array_equal(got, ids)
        assert got.dtype == jnp.int32


@pytest.mark.parametrize("bits", [1, 5, 18, 32])
def test_packing_in_words_gives_the_bytes_of_packing_bits(bits):
    several = [
        np.random.RandomState(size).randint(0, 2**32, size, dtype=np.uint32)
        for size in (0, 1, 31, 32, 1000)
    ]
    packed = [bits_of(ids, bits) for ids in several]
    sizes = [ids.size for ids in several]
    lowest = [ids & np.uint32(2**bits - 1) for ids in several]
    packs = (bits_lib._pack_bits, bits_lib._pack_words)
    unpacks = (bits_lib._unpack_bits, bits_lib._unpack_words)

    @jax.jit
    def all_ways(several, packed):
        return (
            [[pack(ids, bits) for ids in several] for pack in packs],
            [
                [unpack(*each, bits) for each in zip(packed, sizes, strict=True)]
                for unpack in unpacks
            ],
        )

    found, back = all_ways(several, packed)
    jax.tree.map(np.testing.assert_array_equal, found, [packed] * 2)
    jax.tree.map(np.testing.assert_array_equal, back, [lowest] * 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {np.dtype(np.uint32)}


BITMAP = jax.jit(bits_lib.bitmap)
POSITIONS = jax.jit(bits_lib.positions, static_argnums=1)


@pytest.mark.parametrize("real", [0, 10, 500, 990, 1000])
def test_positions_of_marks_are_numpys(real):
    marks = np.random.RandomState(0).permutation(1000) < real
    where = np.flatnonzero(marks)
    words = BITMAP(marks)
    for count in (0, 1, 500, 1005):
        found = POSITIONS(words, count)[:real]
        np.testing.assert_array_equal(found, where[:count])


class Batch(NamedTuple):
    hidden: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray


@struct.dataclass
class State:
    hidden: np.ndarray
    real: np.ndarray


def a_batch(mask):
    rows, columns = mask.shape
    random = np.random.RandomState(0)
    return Batch(
        hidden=random.randn(rows, columns, 5).astype(np.float32),
        ids=random.randint(1, 99, mask.shape).astype(np.int32),
        mask=mask,
        labels=np.arange(rows, dtype=np.int32),
    )


@functools.cache
def compiled(**settings):
    """`pack_tokens`, each option's functions compiled once for each shape."""
    return selector.compiled(codecs.pack_tokens(**settings))


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    mask=hypothesis.extra.numpy.arrays(
        st.sampled_from([np.dtype(bool), np.dtype(np.int32)]),
        (4, 9),
        elements=st.integers(0, 1),
    )
)
def test_tokens_come_back_whatever_the_mask(mask):
    batch = a_batch(mask)
    pack = compiled(capacities=2)
    payload, state = pack.encode(batch, pack.init(batch))
    slots = payload.payload.ids.values.shape[0]
    real = np.count_nonzero(mask)
    assert real <= slots
    assert payload.option == 0 or real > payload.option * mask.size / 2
    np.testing.assert_array_equal(
        payload.payload.hidden.values[:real], batch.hidden[mask != 0]
    )
    assert not np.any(payload.payload.hidden.values[real:])
    got, _ = pack.decode(payload, state)
    np.testing.assert_array_equal(got.mask, mask)
    assert got.mask.dtype == mask.dtype
    real = mask != 0
    np.testing.assert_array_equal(got.hidden, batch.hidden * real[..., None])
    np.testing.assert_array_equal(got.ids, batch.ids * real)
    np.testing.assert_array_equal(got.labels, batch.labels)


def test_the_mask_may_be_an_attribute_of_another_name():
    batch = State(np.ones((2, 4), np.float32), np.eye(2, 4, dtype=bool))
    pack = compiled(mask="real")
    payload, state = pack.encode(batch, ())
    np.testing.assert_array_equal(pack.decode(payload, state)[0].hidden, batch.real)


def test_a_wrong_mask_is_told():
    def encode(**arrays):
        pack = codecs.pack_tokens()
        pack.encode(arrays, ())

    with pytest.raises(ValueError, match="one leaf must be called 'mask'; 0 are"):
        encode(h=np.ones((2, 3)))
    with pytest.raises(ValueError, match="one leaf must be called 'mask'; 2 are"):
        encode(mask=np.ones((2, 3), bool), more={"mask": np.ones((2, 3), bool)})
    with pytest.raises(ValueError, match=r"must be bool or integer \[B, L\]"):
        encode(mask=np.ones((2, 3), np.float32))
