import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.communication import codecs
from nebula_jax.communication.codecs import sparse


@functools.cache
def compiled(fraction):
    codec = codecs.top_k(fraction)
    return jax.jit(codec.encode), jax.jit(codec.decode)


def through(fraction, x):
    encode, decode = compiled(fraction)
    payload, _ = encode(x, ())
    return np.asarray(decode(payload, ())[0]), payload


def by_sorting(x, k):
    """The oracle: a stable sort by falling |x|, NaN first."""
    flat = x.reshape(-1)
    size = np.where(np.isnan(flat), np.inf, np.abs(flat.astype(np.float64)))
    order = np.lexsort((np.arange(flat.size), ~np.isnan(flat), -size))
    where = np.sort(order[:k])
    kept = np.zeros_like(flat)
    kept[where] = flat[where]
    return kept.reshape(x.shape), where


@pytest.mark.parametrize(
    ("fraction", "dtype"),
    [
        (0.001, np.float32),
        (0.05, np.float16),
        (0.5, np.float32),
        (1.0, np.float32),
    ],
)
def test_it_keeps_what_sorting_keeps(fraction, dtype):
    x = np.random.RandomState(0).randn(13, 77).astype(dtype)
    got, payload = through(fraction, x)
    k = max(1, int(fraction * x.size))
    want, where = by_sorting(x, k)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == payload.values.dtype == dtype
    np.testing.assert_array_equal(payload.values, x.reshape(-1)[where])
    bitmap, indices = -(-x.size // 8), -(-k * 10 // 8)
    assert payload.positions.size == min(bitmap, indices)
    if bitmap <= indices:
        marks = np.zeros(x.size, bool)
        marks[where] = True
        np.testing.assert_array_equal(
            payload.positions, np.packbits(marks, bitorder="little")
        )


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    x=hypothesis.extra.numpy.arrays(
        np.float32,
        (40,),
        elements=st.sampled_from(
            [0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, np.inf, -np.inf, np.nan, 3e38]
        ),
    ),
    fraction=st.sampled_from([0.01, 0.3, 0.9]),
)
def test_ties_go_to_the_lower_index_and_nan_counts_as_largest(x, fraction):
    got, _ = through(fraction, x)
    want, _ = by_sorting(x, max(1, int(fraction * 40)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("k", [1, 100, 999, 1000])
def test_both_ways_to_select_give_one_bitmap(k):
    """With ties, zeros, Inf and NaN."""
    x = np.random.RandomState(0).randint(-9, 9, 1000).astype(np.float32)
    x[::97], x[5::97], x[7::97] = np.nan, -np.inf, 1e-40
    size = jnp.asarray(x.view(np.uint32) & np.uint32(0x7FFFFFFF))
    by_threshold, by_sorting = (
        jax.jit(select, static_argnums=1)(size, k)
        for select in (sparse._largest_by_threshold, sparse._largest_by_sorting)
    )
    np.testing.assert_array_equal(by_threshold, by_sorting)


def test_one_value_and_none():
    for shape in ((1,), (), (0, 3)):
        x = np.full(shape, -2.0, np.float32)
        np.testing.assert_array_equal(through(0.01, x)[0], x)


@pytest.mark.parametrize("fraction", [0, 1.5, -1, float("nan"), "half", True])
def test_wrong_fractions_are_told(fraction):
    with pytest.raises(ValueError, match="fraction must be"):
        codecs.top_k(fraction)


def test_the_last_bit_of_a_number_counts():
    flat = jnp.array([1.0, np.nextafter(np.float32(1), np.float32(2))], jnp.float32)
    assert int(sparse.largest(flat, 1)[0]) == 0b10
