import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nebula_jax.training import layer_decay, optimizers


@pytest.mark.parametrize(
    ("path", "factor"),
    [
        ("classifier/output/kernel", 1.0),
        ("encoder/layer_11/output/kernel", 0.8),
        ("encoder/layer_10/attention/query/bias", 0.8**2),
        ("encoder/layer_0/output_layer_norm/scale", 0.8**12),
        ("embeddings/word_embeddings/embedding", 0.8**13),
        ("embeddings/layer_norm/bias", 0.8**13),
    ],
)
def test_factors_are_ernies(path, factor):
    """algorithms.md, section 5: lr d^(n-i), embeddings d^(n+1), classifier d^0."""
    assert layer_decay.factor(path, 0.8, layers=12) == pytest.approx(factor)


def test_a_step_is_adams_times_the_factor():
    params = {
        "embeddings": {"word_embeddings": {"embedding": jnp.ones((3, 2))}},
        "encoder": {f"layer_{n}": {"output": {"kernel": jnp.ones(2)}} for n in (0, 1)},
        "classifier": {"output": {"bias": jnp.ones(3)}},
    }
    grads = jax.tree.map(lambda leaf: leaf * 0.3, params)
    plain = optimizers.adam(lambda step: 0.1)
    decayed = optax.chain(plain, layer_decay.scale_by_layer(0.5, layers=2))
    want, _ = plain.update(grads, plain.init(params), params)
    got, _ = decayed.update(grads, decayed.init(params), params)
    factors = {
        "embeddings": {"word_embeddings": {"embedding": 0.125}},
        "encoder": {
            "layer_0": {"output": {"kernel": 0.25}},
            "layer_1": {"output": {"kernel": 0.5}},
        },
        "classifier": {"output": {"bias": 1.0}},
    }
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a, b * c, rtol=1e-6),
        got,
        want,
        factors,
    )


def test_a_decay_of_one_changes_nothing():
    updates = {"encoder": {"layer_0": {"output": {"kernel": jnp.full(2, 0.1)}}}}
    scale = layer_decay.scale_by_layer(1.0, layers=2)
    got, _ = scale.update(updates, scale.init(updates))
    jax.tree.map(np.testing.assert_array_equal, got, updates)
