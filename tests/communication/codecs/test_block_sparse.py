"""The oracle is SparseLoCo as NumPy writes it, in float64, block by block."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nebula_jax.communication import arrivals, codecs
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import block_sparse


@functools.cache
def compiled(k, block):
    codec = codecs.sparse_loco(k, block)
    return jax.jit(codec.encode), jax.jit(codec.decode)


def through(x, k=4, block=64):
    encode, decode = compiled(k, block)
    payload, _ = encode(x, ())
    return np.asarray(decode(payload, ())[0]), jax.device_get(payload.tree)


def positions_by_hand(x, k, block):
    """Positions in the leaf, by block; a stable sort by falling |x|."""
    flat, found = np.asarray(x, np.float32).reshape(-1), []
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        size = np.where(np.isnan(part), np.inf, np.abs(part))
        order = np.lexsort((np.arange(part.size), ~np.isnan(part), -size))
        kept = k if part.size == block else max(1, k * part.size // block)
        found.append(start + np.sort(order[:kept]))
    return np.concatenate(found)


def quantized_by_hand(values):
    values = values.astype(np.float64)
    shift = values.mean()
    step = 6 * values.std() / 4
    place = (values - shift) / step + 2 if step else np.full(values.shape, 2.0)
    # So near a middle, sums in float32 might round the other way.
    assert np.abs(place - np.floor(place) - 0.5).min() > 1e-5
    codes = np.clip(np.rint(place), 0, 3).astype(int)
    levels = np.full(4, shift)
    for number in set(codes):
        levels[number] += (values - shift)[codes == number].mean()
    return codes, levels


def bits_of(numbers, width):
    """Integers at `width` bits each, least significant bit first."""
    table = (np.asarray(numbers)[:, None] >> np.arange(width)) & 1
    return np.packbits(table.astype(np.uint8).reshape(-1), bitorder="little")


def test_a_payload_is_these_bytes():
    x = np.float32([0, 1, -5, 0.5, 0, 4, 0, -1, 0, 3, 4, -4])
    got, payload = through(x, k=2, block=8)
    # Kept are -5 and 4, and the first 4 of the half block: μ = 1, σ² = 18, s = 6.4.
    assert payload.index.tobytes() == bytes.fromhex("aa00")  # 2, 5, 2 at 3 bits
    assert payload.codes.tobytes() == bytes.fromhex("29")  # 1, 2, 2
    want = "0000803f 0000a0c0 00008040 0000803f"  # 1, as no value is there; -5; 4; 1
    assert payload.levels.tobytes() == bytes.fromhex(want)
    assert got.tolist() == [0, 0, -5, 0, 0, 4, 0, 0, 0, 0, 4, 0]


@pytest.mark.parametrize(
    ("shape", "k", "block"),
    [
        ((13, 77), 4, 64),
        ((13, 77), 64, 64),
        ((13, 77), 7, 100),
        ((13, 77), 32, 4096),
        ((3, 4096), 32, 4096),
        ((3, 7), 1, 1),
    ],
)
def test_it_is_sparse_loco_by_hand(shape, k, block):
    # Of a Gaussian's largest values all are near ±σ, and so in two of the bins.
    x = (np.random.RandomState(3).randn(*shape) ** 5).astype(np.float32)
    got, payload = through(x, k, block)
    where = positions_by_hand(x, k, block)
    width = max(1, int(np.ceil(np.log2(block))))
    np.testing.assert_array_equal(payload.index, bits_of(where % block, width))
    codes, levels = quantized_by_hand(x.reshape(-1)[where])
    assert len(set(codes)) >= 3
    np.testing.assert_array_equal(payload.codes, bits_of(codes, 2))
    np.testing.assert_allclose(payload.levels, levels, rtol=2e-6, atol=1e-7)
    want = np.zeros(x.size, np.float32)
    want[where] = payload.levels[codes]
    np.testing.assert_array_equal(got, want.reshape(shape))
    count = where.size
    nbytes = -(-count * width // 8) + -(-count // 4) + 16
    assert codec_lib.nbytes(payload) == nbytes


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    x=hypothesis.extra.numpy.arrays(
        np.float32,
        (40,),
        elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-40, 1e-30, 1e9]),
    ),
    k=st.sampled_from([1, 3, 16]),
)
def test_ties_go_to_the_lower_index(x, k):
    _, payload = through(x, k, 16)
    where = positions_by_hand(x, k, 16)
    np.testing.assert_array_equal(payload.index, bits_of(where % 16, 4))
    arrivals.check_payload(payload)


def test_both_ways_to_select_give_the_same():
    """Of float32 as on a CPU, and of integers as elsewhere."""
    x = np.random.RandomState(0).randint(-9, 9, (16, 64)).astype(np.float32)
    x[3, ::9], x[4, 5::9], x[5, 7::9] = np.nan, -np.inf, 1e-40
    size = x.view(np.int32) & np.int32(2**31 - 1)
    for k in (1, 8, 64):
        top = jax.jit(functools.partial(block_sparse._top, k=k))
        np.testing.assert_array_equal(top(size), top(size.view(np.float32)))


@pytest.mark.parametrize("value", [0.0, -3.0, 0.1, 1e-30, 1e-40, 3e38])
@pytest.mark.parametrize("size", [1, 200])
def test_values_without_a_spread_come_back(size, value):
    x = np.full(size, value, np.float32)
    got, payload = through(x)
    where = positions_by_hand(x, 4, 64)
    want = np.zeros(size)
    want[where] = value if abs(value) > 1e-38 else 0
    np.testing.assert_allclose(got, want, rtol=1e-6)
    arrivals.check_payload(payload)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_squares_of_large_and_small_values_are_no_problem(scale):
    x = np.random.RandomState(0).randn(500).astype(np.float32)
    scale = np.float32(scale)
    np.testing.assert_array_equal(through(x * scale)[0], through(x)[0] * scale)


@pytest.mark.parametrize(("where", "bad"), [(0, np.nan), (100, np.inf), (299, -np.inf)])
def test_a_bad_value_spoils_its_leaf_and_is_refused_on_arrival(where, bad):
    x = np.random.RandomState(0).randn(2, 300).astype(np.float32)
    x[0, where] = bad
    encode, decode = compiled(4, 64)
    payload, _ = encode({"a": x[0], "b": x[1]}, ())
    got, _ = decode(payload, ())
    kept = np.zeros(300, bool)
    kept[positions_by_hand(x[0], 4, 64)] = True
    assert kept[where]
    np.testing.assert_array_equal(np.isnan(got["a"]), kept)
    np.testing.assert_array_equal(got["a"][~kept], 0)
    np.testing.assert_array_equal(got["b"], through(x[1])[0])
    with pytest.raises(ValueError, match=r"^a: nan is not finite"):
        arrivals.check_payload(jax.device_get(payload))


def tampered(payload, where, position, k=4, block=64):
    """Puts another position in the place of one kept value's."""
    full, _, last = block_sparse.layout(payload.size, k, block)
    numbers = np.unpackbits(payload.index, bitorder="little")[: 6 * (full * k + last)]
    numbers = numbers.reshape(-1, 6) @ (1 << np.arange(6))
    numbers[where] = position
    return payload.replace(index=bits_of(numbers, 6))


@pytest.mark.parametrize(
    ("where", "position", "words"),
    [
        (1, 0, "positions do not ascend"),
        (1, 5, "positions do not ascend"),
        (7, 14, "positions do not ascend"),
        (9, 32, r"32 is not in \[0, 32\)"),
    ],
)
def test_positions_that_no_encoder_makes_are_refused(where, position, words):
    """Two blocks of 64, of which 5, 15, 25 and 35 stay, and a half one: 5 and 15."""
    x = np.zeros(160, np.float32)
    x[np.add.outer([0, 64], [5, 15, 25, 35]).reshape(-1)] = x[[133, 143]] = 1
    _, payload = through(x)
    for good in ((0, 5), (1, 16), (9, 31)):
        arrivals.check_payload({"p": tampered(payload, *good)})
    with pytest.raises(ValueError, match=f"^p: {words}"):
        arrivals.check_payload({"p": tampered(payload, where, position)})


def test_positions_beyond_a_block_are_refused():
    """Thirty-three positions need six bits, which hold 64."""
    x = np.zeros(33, np.float32)
    x[3] = 1
    _, payload = through(x, 1, 33)
    arrivals.check_payload(payload.replace(index=np.uint8([32])))
    with pytest.raises(ValueError, match=r"^33 is not in \[0, 33\)"):
        arrivals.check_payload(payload.replace(index=np.uint8([33])))
