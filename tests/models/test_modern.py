"""A body of today; that it is ModernBERT's is in pretrained/test_pretrained.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.models import modern, transformer

CONFIG = transformer.Config(
    **{"vocab_size": 50, "layers": 4, "width": 16, "heads": 2, "feed_forward": 32},
    **{"max_length": 12, "body": modern.Body()},
)


def test_products_of_turned_vectors_depend_on_their_distance_alone():
    random = np.random.RandomState(0)
    query, key = (
        modern.turn(jnp.broadcast_to(random.randn(8), (1, 12, 1, 8)), theta=100.0)
        for _ in range(2)
    )
    products = np.einsum("bqhk,bmhk->qm", query, key)
    for distance in range(-11, 12):
        assert np.ptp(np.diagonal(products, distance)) < 1e-5
    assert np.ptp(products) > 1


@pytest.mark.parametrize("size", transformer.SIZES)
def test_a_layer_of_a_size_has_as_many_parameters_with_either_body(size):
    def count(body):
        # All layers are alike: trace one.
        config = transformer.config_of_size(
            size, layers=1, body=body, vocab_size=50, max_length=8
        )
        hidden = jax.ShapeDtypeStruct((1, 8, config.width), jnp.float32)
        mask = jax.ShapeDtypeStruct((1, 8), jnp.bool_)
        init = transformer.Encoder(config).init
        shapes = jax.eval_shape(
            lambda *given: init(jax.random.key(0), *given, True), hidden, mask
        )
        return sum(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.ndim > 1)

    assert count(modern.Body()) == pytest.approx(count(None), rel=0.05)


def test_what_layers_that_differ_cannot_do_is_refused_in_words():
    with pytest.raises(errors.SettingsError, match="pipeline=2 needs layers that are"):
        dataclasses.replace(CONFIG, pipeline=2)
    hidden, mask = jnp.zeros((1, 12, 16)), jnp.ones((1, 12), bool)
    cache = transformer.empty_cache(CONFIG, 1, 12)
    with pytest.raises(errors.SettingsError, match="cache: the layers of a body keep"):
        transformer.Encoder(CONFIG).init(
            jax.random.key(0), hidden, mask, True, cache=cache, position=0
        )
