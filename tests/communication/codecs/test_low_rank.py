import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from nebula_jax.communication import codecs
from nebula_jax.communication.codecs import low_rank


@functools.cache
def compiled(codec):
    return jax.jit(codec.encode), jax.jit(codec.decode)


def through(codec, x):
    encode, decode = compiled(codec)
    payload, state = encode(x, codec.init(x))
    return jax.tree.map(np.asarray, decode(payload, state)[0]), payload.tree


def optimum(x, k):
    """Eckart and Young: the error of numpy's SVD cut to k, over all matrices."""
    s = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    return np.sqrt((s[..., k:] ** 2).sum())


def matrix_with(singular_values, m, n, seed=0):
    random = np.random.RandomState(seed)
    k = len(singular_values)
    u, _ = np.linalg.qr(random.randn(m, k))
    v, _ = np.linalg.qr(random.randn(n, k))
    return (u * singular_values @ v.T).astype(np.float32)


GAUSSIAN = np.random.RandomState(0).randn(2, 20, 48).astype(np.float32)
THIRD, HALF = codecs.svd(1 / 3), codecs.svd(0.5)


@pytest.mark.parametrize("ratio", [0.01, 0.6])
def test_the_error_is_within_a_thousandth_of_the_optimum(ratio):
    shapes = ((2, 20, 48), (2, 48, 20), (40, 48))
    several = [GAUSSIAN.reshape(shape) for shape in shapes]
    received, payloads = through(codecs.svd(ratio), several)
    for x, got, payload in zip(several, received, payloads, strict=True):
        k = max(1, int(ratio * min(x.shape[-2:])))
        assert payload.left.shape[-1] == payload.right.shape[-2] == k
        assert np.linalg.norm(got - x) <= 1.001 * optimum(x, k)


def test_flattened_it_is_one_matrix():
    got, payload = through(codecs.svd(0.5, flatten=True), GAUSSIAN)
    assert payload.left.shape == (40, 20)
    flat = GAUSSIAN.reshape(40, 48)
    assert np.linalg.norm(got.reshape(40, 48) - flat) <= 1.001 * optimum(flat, 20)


@pytest.mark.parametrize("decay", [0.9, 0.75])
def test_a_decaying_spectrum_is_cut_within_a_thousandth_of_the_optimum(decay):
    """Down to 2e-3 of the largest: Gram in float32 sees 3e-4."""
    x = matrix_with(decay ** np.arange(60), 200, 60)
    got, _ = through(THIRD, x)
    assert np.linalg.norm(got - x) <= 1.001 * optimum(x, 20)


def test_what_float32_cannot_tell_apart_is_lost_and_no_more():
    x = matrix_with(10.0 ** -np.arange(12), 100, 12)
    got, _ = through(codecs.svd(0.75), x)
    assert np.linalg.norm(got - x) <= optimum(x, 9) + 1e-3 * np.linalg.norm(x, 2)


def test_both_factors_fit_float16_where_singular_values_do_not():
    x = np.full((128, 256), 2000.0, np.float32)  # its singular value is 362,000
    got, payload = through(codecs.chain(codecs.svd(0.01), codecs.fp16()), x)
    assert np.asarray(payload.tree.left).max() < 2000
    np.testing.assert_allclose(got, x, rtol=2e-3)


@pytest.mark.parametrize("scale", [1e-14, 1e-9, 1e9, 1e16])
def test_small_and_large_matrices_are_not_lost_in_the_squares(scale):
    x = GAUSSIAN[0] * np.float32(scale)
    got, _ = through(HALF, x)
    error = np.linalg.norm(got.astype(np.float64) / scale - GAUSSIAN[0])
    assert error <= 1.001 * optimum(GAUSSIAN[0], 10)


SEVERAL_AT_ONCE = """
import jax, numpy as np
from nebula_jax.communication import codecs
codec = codecs.svd(0.5)
leaves = [np.random.RandomState(i).randn(32, 64, 64).astype("f") for i in range(12)]
encode = jax.jit(codec.encode)
for _ in range(20):
    jax.block_until_ready(encode(leaves, ()))
"""


@pytest.mark.slow
def test_many_leaves_at_once_do_not_wait_for_each_other_for_ever():
    """As batched `eigh`s of one program do, on two cores; so this is a process."""
    # Threads of OpenBLAS spin while they wait: for minutes on a machine that is busy.
    environment = os.environ | {"XLA_FLAGS": "", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SEVERAL_AT_ONCE]
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_many_matrices_are_as_each_by_itself(monkeypatch):
    """Two groups of them, and what is left."""
    monkeypatch.setattr(low_rank, "GROUP", 2)
    x = np.random.RandomState(0).randn(5, 6, 9).astype(np.float32)
    got, payload = through(codecs.svd(0.5), x)
    assert payload.left.shape == (5, 6, 3)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    by_numpy = (u[..., :3] * s[:, None, :3]) @ v[:, :3]
    np.testing.assert_allclose(got, by_numpy, atol=1e-5)


def test_rank_is_the_floor_also_where_binary_fractions_fall_short():
    assert low_rank.rank(0.29, 100, 200) == 29  # 0.29 * 100 is 28.999999999999996
    assert low_rank.rank(0.6, 64, 768) == 38
    assert low_rank.rank(0.001, 64, 768) == 1
    assert low_rank.rank(1, 64, 768) == 64
