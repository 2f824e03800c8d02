import jax.numpy as jnp
import numpy as np

from nebula_jax.training import state as train_state


def test_a_running_mean_is_numpys():
    random = np.random.RandomState(0)
    trees = [{"a": random.randn(3), "b": {"c": random.randn(2, 2)}} for _ in range(5)]
    mean = {"a": jnp.full(3, 7.0), "b": {"c": jnp.full((2, 2), 7.0)}}  # of nothing
    for count, tree in enumerate(trees, 1):
        mean = train_state.running_mean(mean, tree, count)
        want = np.mean([each["a"] for each in trees[:count]], axis=0)
        np.testing.assert_allclose(mean["a"], want, rtol=1e-5, atol=1e-6)
    want = np.mean([each["b"]["c"] for each in trees], axis=0)
    np.testing.assert_allclose(mean["b"]["c"], want, rtol=1e-5, atol=1e-6)
