import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nebula_jax.training import m3

DRAWS = 20_000
categorical = jax.jit(m3.categorical)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, "float32"), (7, "float32"), (1001, "float32"), (100, "bfloat16")],
)
def test_frequencies_are_those_of_softmax(size, dtype):
    logits = 2.0 * np.random.RandomState(size).randn(size)
    logits = logits.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    many = np.broadcast_to(logits, (DRAWS, size))
    found = np.asarray(categorical(jax.random.key(1), many))
    assert found.dtype == np.int32
    counts = np.bincount(found, minlength=size)
    assert len(counts) == size
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    chi_square = np.sum((counts - DRAWS * p) ** 2 / (DRAWS * p))
    # Mean size - 1, variance about twice that.
    assert chi_square < size - 1 + 5 * np.sqrt(2 * size)


@pytest.mark.parametrize("size", [50, 10_007])
def test_what_is_impossible_is_never_drawn(size):
    is_possible = np.arange(size) % 7 == 3
    logits = np.random.RandomState(2).randn(size).astype(np.float32)
    many = np.broadcast_to(np.where(is_possible, logits, -np.inf), (200, size))
    found = np.asarray(categorical(jax.random.key(0), many))
    assert is_possible[found].all()
    assert len(set(found.tolist())) > 3


@pytest.mark.parametrize("place", [0, 4, 8, 9])
def test_the_largest_random_number_still_hits_something(place, monkeypatch):
    monkeypatch.setattr(
        "jax.random.uniform", lambda rng, shape: jnp.full(shape, 1.0 - 2.0**-23)
    )
    logits = np.where(np.arange(10) <= place, np.float32(0.3), -np.inf)
    largest = jax.jit(lambda *args: m3.categorical(*args))  # traced anew
    assert int(largest(jax.random.key(0), logits)) == place
