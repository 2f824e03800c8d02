import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.communication.codecs import low_rank


@functools.cache
def compiled(codec):
    return jax.jit(codec.encode), jax.jit(codec.decode)


def through(codec, x):
    encode, decode = compiled(codec)
    payload, state = encode(x, codec.init(x))
    return jax.tree.map(np.asarray, decode(payload, state)[0]), payload


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


GAUSSIAN = np.random.RandomState(0).randn(4, 20, 48).astype(np.float32)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.9])
def test_the_error_is_within_a_thousandth_of_the_optimum(ratio):
    shapes = ((4, 20, 48), (4, 48, 20), (80, 48))
    several = [GAUSSIAN.reshape(shape) for shape in shapes]
    received, payloads = through(codecs.svd(ratio), several)
    for x, got, payload in zip(several, received, payloads, strict=True):
        k = max(1, int(ratio * min(x.shape[-2:])))
        assert payload.left.shape[-1] == payload.right.shape[-2] == k
        assert np.linalg.norm(got - x) <= 1.001 * optimum(x, k)


def test_flattened_it_is_one_matrix():
    got, payload = through(codecs.svd(0.5, flatten=True), GAUSSIAN)
    assert payload.left.shape == (80, 24)
    flat = GAUSSIAN.reshape(80, 48)
    assert np.linalg.norm(got.reshape(80, 48) - flat) <= 1.001 * optimum(flat, 24)


@pytest.mark.parametrize("decay", [0.9, 0.75])
def test_a_decaying_spectrum_is_cut_within_a_thousandth_of_the_optimum(decay):
    """Down to 2e-3 of the largest: Gram in float32 sees 3e-4."""
    x = matrix_with(decay ** np.arange(60), 200, 60)
    k = 20
    got, _ = through(codecs.svd(k / 60), x)
    assert np.linalg.norm(got - x) <= 1.001 * optimum(x, k)


def test_what_float32_cannot_tell_apart_is_lost_and_no_more():
    x = matrix_with(10.0 ** -np.arange(12), 100, 12)
    got, _ = through(codecs.svd(0.75), x)
    assert np.linalg.norm(got - x) <= optimum(x, 9) + 1e-3 * np.linalg.norm(x, 2)


@pytest.mark.parametrize(
    ("ratio", "paper"),
    [(0.9, 0.45), (0.8, 0.40), (0.7, 0.34), (0.6, 0.30), (0.4, 0.20), (0.2, 0.09)],
)
def test_ratios_are_those_of_table_5_but_for_the_left_factor(ratio, paper):
    """64 tokens a sentence: m (1 + m / n) / m is 8 % above what the paper prints."""
    codec = codecs.chain(codecs.svd(ratio), codecs.fp16())
    spec = jax.ShapeDtypeStruct((128, 64, 768), jnp.float32)
    assert codec_lib.ratio(codec, spec) == pytest.approx(paper * 13 / 12, rel=0.06)


def test_both_factors_fit_float16_where_singular_values_do_not():
    x = np.full((128, 256), 2000.0, np.float32)  # its singular value is 362,000
    got, payload = through(codecs.chain(codecs.svd(0.01), codecs.fp16()), x)
    assert np.asarray(payload.left.data).max() < 2000
    np.testing.assert_allclose(got, x, rtol=2e-3)


@pytest.mark.parametrize("scale", [1e-14, 1e-9, 1e9, 1e16])
def test_small_and_large_matrices_are_not_lost_in_the_squares(scale):
    x = GAUSSIAN[0] * np.float32(scale)
    got, _ = through(codecs.svd(0.5), x)
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


def test_many_matrices_are_as_each_by_itself():
    x = np.random.RandomState(0).randn(37, 6, 9).astype(np.float32)
    got, payload = through(codecs.svd(0.5), x)
    assert payload.left.shape == (37, 6, 3)
    for matrix, ours in zip(x, got, strict=True):
        np.testing.assert_allclose(through_one(matrix), ours, atol=1e-5)


def through_one(matrix):
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :3] * s[:3]) @ v[:3]


def test_rank_is_the_floor_also_where_binary_fractions_fall_short():
    assert low_rank.rank(0.29, 100, 200) == 29  # 0.29 * 100 is 28.999999999999996
    assert low_rank.rank(0.6, 64, 768) == 38
    assert low_rank.rank(0.001, 64, 768) == 1
    assert low_rank.rank(1, 64, 768) == 64


def relative_errors(codec, tensors):
    state, errors = codec.init(tensors[0]), []
    encode, decode = compiled(codec)
    for x in tensors:
        payload, state = encode(x, state)
        got, _ = decode(payload, ())  # decoding needs no state
        errors.append(float(np.linalg.norm(got - x)))
    return errors


def test_subspace_approaches_the_optimum_on_one_matrix():
    x = matrix_with(1 / np.arange(1, 41), 120, 40).reshape(4, 30, 40)
    errors = relative_errors(codecs.subspace(8), [x] * 12)
    best = optimum(x.reshape(120, 40), 8)
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.005 * best
    assert errors[-1] >= 0.9999 * best
    cold = relative_errors(codecs.subspace(8, seed=1), [x])
    assert cold[0] != errors[0]


def test_one_step_of_subspace_is_powersgds():
    x = GAUSSIAN[0]
    codec = codecs.subspace(5)
    (q,) = codec.init(x)
    p, _ = np.linalg.qr(x @ np.asarray(q))
    np.testing.assert_allclose(through(codec, x)[0], p @ (p.T @ x), atol=1e-4)


def test_subspace_comes_back_from_zeros_and_nan():
    x = matrix_with(0.5 ** np.arange(10), 30, 10)
    bad = x.copy()
    bad[0, 0] = np.nan
    zeros = np.zeros_like(x)
    errors = relative_errors(codecs.subspace(4), [zeros, zeros, bad, *[x] * 8])
    assert errors[0] == 0
    assert np.isnan(errors[2])
    assert errors[-1] < 1.01 * optimum(x, 4)


@pytest.mark.parametrize("first", ["zeros", "one_row", "one_column", "rank_one"])
@pytest.mark.parametrize("codec", ["subspace(8)", "subspace(8)|fp16"])
def test_subspace_keeps_its_rank_after_a_tensor_of_less(first, codec):
    """As after a micro-batch without a gradient; then [CLS] alone has gradients."""
    random = np.random.RandomState(0)
    x = np.zeros((9, 16, 24), np.float32)
    x[1:, 0] = random.randn(8, 24)  # the first rows are zero, which QR completes
    poor = np.zeros_like(x)
    if first == "one_row":
        poor[0, 0] = 1
    elif first == "one_column":
        poor[..., 3] = 1
    elif first == "rank_one":
        poor[:] = random.randn(9, 16, 1) * random.randn(24)
    made = codecs.from_string(codec)
    state = made.init(x)
    for tensor in (poor, x, x):
        payload, state = compiled(made)[0](tensor, state)
    got, _ = compiled(made)[1](payload, state)
    assert np.linalg.norm(got - x) < 0.002 * np.linalg.norm(x)  # float16 rounds


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-7, 1e20, 1e35])
def test_subspace_is_as_good_for_small_and_large_values(scale):
    """Q has columns of length 1: with R itself A Q is of the size of A squared."""
    x = matrix_with([3, 2, 1], 64, 32) * np.float32(scale)
    codec = codecs.subspace(4)
    state = codec.init(x)
    for _ in range(6):
        payload, state = compiled(codec)[0](x, state)
        got = np.asarray(compiled(codec)[1](payload, ())[0])
        assert np.linalg.norm(got / scale - x.astype(np.float64) / scale) < 1e-5
        np.testing.assert_allclose(
            np.linalg.norm(payload.left, axis=0),
            np.linalg.norm(payload.right, axis=1),
            rtol=1e-4,
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_the_subspace_as_it_was(bad):
    encode, decode = compiled(codecs.subspace(4))
    _, (before,) = encode(GAUSSIAN, codecs.subspace(4).init(GAUSSIAN))
    x = GAUSSIAN.copy()
    x[2, 3, 4] = bad
    payload, (after,) = encode(x, (before,))
    np.testing.assert_array_equal(after, before)
    assert np.isnan(decode(payload, ())[0]).all()


def test_a_subspace_with_a_column_of_zeros_makes_no_nan():
    """As checkpoints of earlier versions may have one."""
    encode, decode = compiled(codecs.subspace(4))
    (q,) = codecs.subspace(4).init(GAUSSIAN)
    payload, (after,) = encode(GAUSSIAN, (q.at[:, 2].set(0),))
    assert np.isfinite(decode(payload, ())[0]).all()
    np.testing.assert_allclose(np.linalg.norm(after, axis=0), 1, rtol=1e-5)


def test_vectors_pass_and_wide_ranks_are_cut_to_the_matrix():
    x = {"v": np.ones(5, np.float32), "m": GAUSSIAN[0]}
    for codec in (codecs.svd(0.5), codecs.subspace(1000)):
        payload, _ = compiled(codec)[0](x, codec.init(x))
        np.testing.assert_array_equal(payload["v"], x["v"])
    assert payload["m"].left.shape == (20, 20)


@pytest.mark.parametrize(
    "ratio", [0, -0.1, 1.01, float("nan"), float("inf"), "r", True]
)
def test_wrong_ratios_are_told(ratio):
    with pytest.raises(ValueError, match="ratio must be"):
        codecs.svd(ratio)


def test_other_wrong_arguments_are_told():
    with pytest.raises(ValueError, match="rank must be a positive integer, not 0"):
        codecs.subspace(0)
    with pytest.raises(ValueError, match="flatten must be"):
        codecs.svd(0.5, "yes")
