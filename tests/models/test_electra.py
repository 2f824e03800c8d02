import dataclasses
import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.models import masked_lm, transformer

CONFIG = transformer.config_of_size("nano", layers=1, vocab_size=60, max_length=16)
IDS = np.random.RandomState(0).randint(5, 60, (2, 16)).astype(np.int32)
MASK = np.ones((2, 16), bool)
POSITIONS = np.asarray([[1, 5, 16], [2, 16, 16]], np.int32)
INPUTS = (IDS, MASK, POSITIONS)


def test_corrective_logits_are_eq_10():
    """Hidden state of the masked position times the token's embedding, plus a bias."""
    discriminator = masked_lm.Discriminator(CONFIG)
    params = drawn.params(discriminator, *INPUTS, seed=1)
    by_hand = jax.jit(functools.partial(transformer.hidden_states, CONFIG))
    hidden = np.asarray(by_hand(params, IDS, MASK))
    table = np.asarray(params["embeddings"]["word_embeddings"]["embedding"])
    bias = np.asarray(params["clm_head"]["bias"])
    _, clm = jax.jit(discriminator.apply)({"params": params}, *INPUTS)
    clm = np.asarray(clm)
    for row, slot in np.argwhere(POSITIONS < 16):
        want = hidden[row, POSITIONS[row, slot]] @ table.T + bias
        np.testing.assert_allclose(clm[row, slot], want, atol=1e-4)


def test_disentangled_embeddings_learn_apart_from_the_output_layer():
    """The deltas all that the encoder learns, the table what its output layer does."""
    apart = masked_lm.Discriminator(dataclasses.replace(CONFIG, disentangled=True))
    params = drawn.params(apart, *INPUTS)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(module, params, rtd, clm):
        def total(params):
            of_rtd, of_clm = module.apply({"params": params}, *INPUTS)
            return rtd * jnp.sum(of_rtd**2) + clm * jnp.sum(of_clm**2), of_rtd

        return jax.grad(total, has_aux=True)(params)

    deltas = params["embeddings"]["word_deltas"]["embedding"]
    joined = dict(params["embeddings"])
    table = joined["word_embeddings"]["embedding"]
    joined.pop("word_deltas")
    joined = params | {
        "embeddings": joined | {"word_embeddings": {"embedding": table + deltas}}
    }
    rtd, logits = gradients(apart, params, 1.0, 0.0)
    want, wanted = gradients(masked_lm.Discriminator(CONFIG), joined, 1.0, 0.0)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    found = rtd["embeddings"]
    assert not found["word_embeddings"]["embedding"].any()
    np.testing.assert_allclose(
        found["word_deltas"]["embedding"],
        want["embeddings"]["word_embeddings"]["embedding"],
        atol=1e-4,
    )
    clm, _ = gradients(apart, params, 0.0, 1.0)
    assert clm["embeddings"]["word_embeddings"]["embedding"].any()


def test_the_papers_models_have_the_papers_sizes():
    """Counted without memory: the discriminator has the paper's 550 million. The
    generator has 277 million; the paper's "220 million" does not fit its own vocabulary
    of 250,002 pieces at width 768."""
    ids = np.zeros((1, 1), np.int32)

    def count(module, size, layers):
        given = {"layers": layers, "vocab_size": 250_002, "max_length": 512}
        made = module(transformer.config_of_size(size, **given))
        shapes = jax.eval_shape(made.init, jax.random.key(0), ids, ids == 0, ids)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def millions(module, size):
        """Of layers that are alike: to trace all of them takes seconds."""
        one, two = (count(module, size, layers) for layers in (1, 2))
        return (one + (transformer.SIZES[size][0] - 1) * (two - one)) / 1e6

    assert millions(masked_lm.Discriminator, "large") == pytest.approx(560, abs=2)
    assert millions(masked_lm.MaskedLM, "base") == pytest.approx(278, abs=1)
