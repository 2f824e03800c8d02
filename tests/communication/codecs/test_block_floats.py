import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nebula_jax.communication import arrivals, codecs
from nebula_jax.communication import codec as codec_lib

LEAST = np.float32(2.0**-119)
encode = {block: jax.jit(codecs.e3m0(block).encode) for block in (4, 8, 256)}
decode = {block: jax.jit(codecs.e3m0(block).decode) for block in (4, 8, 256)}


def through(x, block=8):
    """Returns the arrays received, and the payload of each."""
    payload, _ = encode[block](x, ())
    return jax.device_get(decode[block](payload, ())[0]), payload.tree


def by_hand(x, block):
    """The oracle, in float64, where half of each step is exact: values and nibbles."""
    flat = x.reshape(-1).astype(np.float64)
    block = max(1, min(block, flat.size))
    blocks = np.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True)
    scale = np.where(scale < LEAST, 0, scale)
    levels = np.concatenate([[0], 2.0 ** np.arange(-6, 1)])
    middle = (levels[1:] + levels[:-1]) / 2
    level = (np.abs(blocks)[..., None] >= middle * scale[..., None]).sum(-1)
    level = np.where(scale > 0, level, 0)
    value = np.copysign(levels[level] * scale, blocks).reshape(-1)[: flat.size]
    nibble = np.where((level > 0) & (blocks < 0), level | 8, level)
    scale = scale.reshape(-1).astype(np.float32)
    return value.reshape(x.shape), nibble.reshape(-1)[: flat.size], scale


def two_a_byte(nibbles):
    low, high = np.pad(nibbles, (0, nibbles.size % 2)).reshape(2, -1)
    return (low | (high << 4)).astype(np.uint8)


def test_a_payload_is_these_bytes():
    x = np.float32([8, -6, 3, 0.5, 0, -1, 1 / 64, 1 / 200])
    got, payload = through(x, 4)
    # 7 and 0, -7 and -7, 6 and 1, 3 and 0: halfway goes up in size, as -6 and 3 do.
    assert np.ravel(payload.data).tolist() == [0x07, 0xFF, 0x16, 0x03]
    assert np.asarray(payload.scale).tobytes() == bytes.fromhex("000000410000803f")
    assert got.tolist() == [8, -8, 4, 0.5, 0, -1, 1 / 64, 0]


@pytest.mark.parametrize("block", [8, 256])
def test_it_is_rounding_to_the_nearest_power_by_hand(block):
    random = np.random.RandomState(0)
    several = [
        np.float32(random.randn(*shape) * 10.0 ** random.uniform(-4, 1, shape))
        for shape in [(6, 10), (2, 256), (3, 512), (7, 3), (1,), ()]
    ]
    for x, got, payload in zip(several, *through(several, block), strict=True):
        want, nibbles, scale = by_hand(x, block)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(payload.scale, scale)
        np.testing.assert_array_equal(np.ravel(payload.data), two_a_byte(nibbles))
        assert codec_lib.nbytes(payload) == -(-x.size // 2) + 4 * -(-x.size // block)


SCALES = st.floats(2.0**-119, 2.0**127, width=32)


@hypothesis.given(scale=SCALES)
def test_it_rounds_right_beside_every_middle_for_every_scale(scale):
    """One unit in the last place on either side, where products would be too coarse."""
    scale = np.float32(scale)
    middle = np.float64(scale) * np.append(0.75 * 2.0 ** np.arange(0, -6, -1), 2.0**-7)
    near = middle.astype(np.float32)
    below, above = (np.nextafter(near, np.float32(to)) for to in (0, np.inf))
    x = np.concatenate([[scale], near, below, above, -near]).astype(np.float32)
    got, payload = through(x, 256)
    want, nibbles, _ = by_hand(x, 256)
    np.testing.assert_array_equal(np.ravel(payload.data), two_a_byte(nibbles))
    np.testing.assert_array_equal(got, want)


def test_blocks_of_very_small_values_are_zeros_and_large_ones_are_kept():
    below = np.nextafter(LEAST, np.float32(0))
    x = np.repeat(np.float32([LEAST, below, 1e-40, 3.4e38]), 8)
    x[::8] *= -1
    got, payload = through(x, 8)
    want = np.where((np.abs(x) == LEAST) | (np.abs(x) > 1), x, 0)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(payload.scale, np.float32([LEAST, 0, 0, 3.4e38]))
    # The lowest level of the least scale is a normal number still.
    x = np.float32([LEAST] + 7 * [LEAST * 2.0**-6])
    np.testing.assert_array_equal(through(x, 8)[0], x)


@pytest.mark.parametrize("scale", [-1.0, np.inf, 1e-40, 2.0**-120])
def test_a_scale_that_no_encoder_makes_is_refused(scale):
    payload = jax.device_get(through(np.ones(16, np.float32))[1])
    for good in (0.0, 2.0**-119, 3e38, np.nan):
        arrivals.check_payload({"p": payload.replace(scale=np.float32([good, 1.0]))})
    with pytest.raises(ValueError, match=r"^p: .* is no scale"):
        arrivals.check_payload({"p": payload.replace(scale=np.float32([1.0, scale]))})
