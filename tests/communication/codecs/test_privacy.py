"""What a site lets leave: bounded norms, and noise that nobody can draw again."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from nebula_jax import errors
from nebula_jax.communication import codecs


def test_a_norm_of_all_leaves_is_clipped_and_a_smaller_one_is_not():
    arrays = {"a": jnp.full((2, 8), 3.0), "b": jnp.full(9, -4.0), "ids": jnp.arange(3)}
    norm = math.sqrt(16 * 9 + 9 * 16)
    for clip in (0.5, 2 * norm):
        codec = codecs.from_string(f"private({clip})")
        payload, _ = jax.jit(codec.encode)(arrays, codec.init(arrays))
        for name in "ab":
            wanted = np.asarray(arrays[name]) * min(1, clip / norm)
            np.testing.assert_allclose(payload[name], wanted, rtol=1e-6)
        assert payload["ids"].tolist() == [0, 1, 2]


def test_noise_is_as_large_as_it_says_and_another_each_time():
    codec = codecs.private(2.0, 0.5)
    zeros = {"a": jnp.zeros((100, 200)), "b": jnp.zeros(20_000)}
    encode, state, found = jax.jit(codec.encode), codec.init(zeros), []
    for _ in range(2):
        payload, state = encode(zeros, state)
        found += [np.ravel(payload["a"]), np.ravel(payload["b"])]
    other, _ = encode(zeros, codec.init(zeros))
    found.append(np.ravel(other["a"]))  # a second start draws from other bits
    for noise in found:
        assert stats.kstest(noise, stats.norm(scale=1.0).cdf).pvalue > 1e-6
    assert np.abs(np.corrcoef(found) - np.eye(5)).max() < 0.05


def test_a_run_that_resumes_adds_the_same_noise():
    codec = codecs.private(1.0, 1.0)
    x, encode = jnp.ones((4, 4)), jax.jit(codec.encode)
    _, saved = encode(x, codec.init(x))
    restored = jax.tree.map(np.array, saved)
    np.testing.assert_array_equal(encode(x, saved)[0], encode(x, restored)[0])


@pytest.mark.parametrize("codec", [codecs.private(1.0), codecs.private(1.0, 0.1)])
def test_a_value_that_is_not_finite_is_not_hidden(codec):
    encode = jax.jit(codec.encode)
    for bad in (np.nan, np.inf, -np.inf):
        x = {"a": np.ones(3, np.float32), "b": np.float32([bad, 1])}
        payload, _ = encode(x, codec.init(x))
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(payload))


@pytest.mark.parametrize(
    "arguments", ["0", "-1", "1e999", "true", "1,-0.1", "1,1e999", "one"]
)
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(codecs.CodecError, match=r"clip|noise"):
        codecs.from_string(f"private({arguments})")


def test_a_complex_leaf_does_not_pass_as_it_is():
    with pytest.raises(errors.SettingsError, match="real and imaginary part"):
        codecs.private(1.0).init({"h": jnp.ones(3), "z": jnp.ones(3, jnp.complex64)})


@pytest.mark.parametrize(("noise", "messages"), [(1.0, 1), (4.0, 30)])
def test_epsilon_is_an_upper_bound_that_is_not_far(noise, messages):
    """So many messages are as one with less noise (Balle and Wang 2018, theorem 8)."""
    ratio, delta = math.sqrt(messages) / noise, 1e-5

    def excess(epsilon):
        one = stats.norm.cdf(ratio / 2 - epsilon / ratio)
        two = stats.norm.cdf(-ratio / 2 - epsilon / ratio)
        return one - math.exp(epsilon) * two - delta

    exact = optimize.brentq(excess, 1e-6, 100)
    assert exact <= codecs.epsilon(noise, messages, delta) <= 1.2 * exact
