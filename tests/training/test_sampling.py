import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import sampling

DRAWS = 20_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 7, 100, 1001])
def test_frequencies_are_those_of_softmax(size, dtype):
    logits = 2.0 * jax.random.normal(jax.random.key(size), (size,)).astype(dtype)
    many = jnp.broadcast_to(logits, (DRAWS, size))
    found = np.asarray(jax.jit(sampling.categorical)(jax.random.key(1), many))
    assert found.dtype == np.int32
    counts = np.bincount(found, minlength=size)
    assert len(counts) == size
    p = np.asarray(jax.nn.softmax(logits.astype(jnp.float32)), np.float64)
    chi_square = np.sum((counts - DRAWS * p) ** 2 / (DRAWS * p))
    # Mean size - 1, variance about twice that.
    assert chi_square < size - 1 + 5 * np.sqrt(2 * size)


@pytest.mark.parametrize("size", [50, 100_003])
def test_what_is_impossible_is_never_drawn(size):
    is_possible = np.arange(size) % 7 == 3
    logits = jnp.where(
        is_possible, jax.random.normal(jax.random.key(2), (size,)), -jnp.inf
    )
    many = jnp.broadcast_to(logits, (200, size))
    found = np.asarray(sampling.categorical(jax.random.key(0), many))
    assert is_possible[found].all()
    assert len(set(found.tolist())) > 3


@pytest.mark.parametrize("place", [0, 4, 8, 9])
def test_the_largest_random_number_still_hits_something(place, monkeypatch):
    monkeypatch.setattr(
        "jax.random.uniform", lambda rng, shape: jnp.full(shape, 1.0 - 2.0**-23)
    )
    logits = jnp.where(jnp.arange(10) <= place, 0.3, -jnp.inf)
    assert int(sampling.categorical(jax.random.key(0), logits)) == place


def test_every_row_is_drawn_by_itself():
    logits = jnp.log(jnp.eye(12))[None, ::-1]
    found = sampling.categorical(jax.random.key(0), logits)
    np.testing.assert_array_equal(found, [np.arange(12)[::-1]])
