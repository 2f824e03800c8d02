import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from nebula_jax.communication import codecs


def through(codec, x):
    payload, state = jax.jit(codec.encode)(x, codec.init(x))
    return np.asarray(jax.jit(codec.decode)(payload, state)[0])


def rotation(size, seed=0, block=256):
    """The matrix that `hadamard` multiplies a row with, by columns of the identity."""
    codec = codecs.hadamard(block, seed)
    return np.asarray(jax.jit(codec.encode)(jnp.eye(size), ())[0].tree)


@pytest.mark.parametrize("size", [1, 256])
def test_it_is_scipys_hadamard_matrix_with_signs(size):
    matrix = rotation(size)
    signs = np.sign(matrix[:, 0])
    want = signs[:, None] * scipy.linalg.hadamard(size) / np.sqrt(size)
    np.testing.assert_allclose(matrix, want, rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)


def test_signs_are_random_and_seeded():
    first, second = (np.sign(rotation(256, seed)[:, 0]) for seed in (0, 1))
    assert 90 < (first > 0).sum() < 166
    assert (first != second).sum() > 60


@pytest.mark.parametrize(
    ("width", "block", "used"), [(768, 256, 256), (384, 256, 128), (21, 256, 1)]
)
def test_blocks_are_the_largest_power_of_two_that_divides(width, block, used):
    matrix = rotation(width, block=block)
    blocks = np.kron(np.eye(width // used), np.ones((used, used))) > 0
    np.testing.assert_array_equal(matrix != 0, blocks)


def test_a_block_size_between_powers_is_rounded_down():
    assert (rotation(64, block=24) != 0).sum() == 64 * 16


@pytest.mark.parametrize("width", [384, 96])
def test_devices_that_add_in_another_order_decode_the_same(width):
    """Clusters that average deltas must: they go on from what they have decoded."""
    codec = codecs.chain(codecs.hadamard(), codecs.int4(64), codecs.bf16())
    random = np.random.RandomState(0)
    x = random.standard_t(4, (32, width)).astype(np.float32)
    got = through(codec, x)
    inner = codecs.chain(codecs.int4(64), codecs.bf16())
    rotated, _ = jax.jit(codecs.hadamard().encode)(x, ())
    rows = np.asarray(through(inner, np.asarray(rotated.tree)), np.float64)
    block = width & -width
    signs = np.sign(rotation(width)[:block, :block].T)
    exact = rows.reshape(-1, block) @ signs  # float64: no sum is rounded
    want = exact.astype(np.float32) * np.float32(1 / np.sqrt(block))
    np.testing.assert_array_equal(exact, exact.astype(np.float32))
    np.testing.assert_array_equal(got.reshape(-1, block), want)
