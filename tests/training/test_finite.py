import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import finite


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (40_000, 2), (0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_value_of_a_tree_tells(shape, dtype):
    leaf = np.ones(shape, jnp.dtype(dtype))
    tree = {"other": np.ones(3, np.float32), "leaf": leaf, "count": np.arange(3)}
    assert finite.all_finite(tree)
    for value in (np.nan, np.inf, -np.inf)[: 3 * bool(leaf.size)]:
        leaf.flat[-1] = value
        assert not finite.all_finite(tree)
        leaf.flat[0] = np.inf  # and none hides another
        assert not finite.all_finite(tree)
        leaf.flat[0] = 1


def test_a_square_that_is_infinite_tells_too():
    tree = {"w": np.float32([3e19, -3e19])}
    assert finite.all_finite(tree)
    assert not jnp.isfinite(jnp.square(tree["w"])).all()
    assert not finite.all_finite(tree, squares=True)
    assert finite.all_finite({"w": np.float32([1e18, -1e18])}, squares=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_squares_are_those_of_the_type(dtype):
    largest = float(jnp.finfo(dtype).max) ** 0.5
    assert finite.all_finite(jnp.full(1, largest / 4, dtype), squares=True)
    assert not finite.all_finite(jnp.full(1, largest * 4, dtype), squares=True)


def test_the_largest_values_are_finite():
    largest = float(np.finfo(np.float32).max)
    assert finite.all_finite({"w": np.full((2, 1000), largest, np.float32)})


def test_a_tree_without_floats_is_finite():
    assert finite.all_finite({"key": jax.random.key(0), "count": np.int32(1)})
