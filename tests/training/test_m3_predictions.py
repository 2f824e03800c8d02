"""Probes of the discriminator against gradients and hidden states taken by hand."""

import dataclasses
import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nebula_jax.models import masked_lm, transformer
from nebula_jax.training import m3, m3_predictions

V, L, B = 97, 12, 4
SHAPE = transformer.Config(
    vocab_size=V, layers=1, width=32, heads=4, feed_forward=64, max_length=L
)
CONFIG = m3.Config(SHAPE, SHAPE, steps=20, rtd_weight=7.0, clm_weight=3.0)


@pytest.fixture(scope="module")
def params():
    ids = np.zeros((1, L), np.int32)
    return drawn.params(masked_lm.Discriminator(SHAPE), ids, ids == 0, ids[:, :2])


mask = jax.jit(m3.mask, static_argnums=0)


def tokens(seed):
    random = np.random.RandomState(seed)
    ids = jnp.asarray(random.randint(5, V, (B, L)), jnp.int32)
    (ids, masked), _ = mask(CONFIG, jax.random.key(seed), ids)
    sampled = masked.input_ids.at[:, 3].set(9)
    marks = masked.input_ids == 4
    return m3.Tokens(sampled, marks, masked.originals)


def test_gradients_are_those_of_each_term_by_itself(params):
    batch = tokens(0)
    norms = jax.jit(functools.partial(m3_predictions.gradient_norms, CONFIG))
    found = norms(params, [batch])
    assert len(found) == 4

    def loss(params, rtd, clm):
        alone = dataclasses.replace(CONFIG, rtd_weight=rtd, clm_weight=clm)
        return m3.discriminator_loss(alone, params, jax.random.key(1), batch)[0]

    gradient = jax.jit(jax.grad(loss))
    for term, *weights in (("rtd", 7.0, 0.0), ("clm", 0.0, 3.0)):
        grads = gradient(params, *weights)
        heads = [grads[name] for name in ("rtd_head", "clm_head")]
        rest = [grads[name] for name in ("embeddings", "encoder")]
        expected = optax.tree.norm(heads), optax.tree.norm(rest)
        assert min(expected) > 0
        names = f"{term}_heads_gradient", f"{term}_encoder_gradient"
        np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-5)


def test_a_sentence_is_the_mean_of_its_tokens_and_of_no_padding(params):
    embed = jax.jit(functools.partial(m3_predictions.sentence_vectors, CONFIG))
    ids = np.asarray(tokens(1).input_ids)
    one = np.where(np.arange(L) < 5, ids, 0)
    found = embed(params, one)
    assert found.shape == (B, 32)
    other = np.where(np.arange(L) < 6, ids, 0)
    assert not np.allclose(found, embed(params, other))
    alone = jax.jit(functools.partial(transformer.hidden_states, SHAPE))
    for row in range(B):  # by itself, without a token of padding
        ids = one[row : row + 1, :5]
        want = alone(params, ids, ids > 0)[0].mean(0)
        np.testing.assert_allclose(found[row], want, atol=1e-5)
