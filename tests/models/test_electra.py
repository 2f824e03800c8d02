import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_halves

from nebula_jax.models import electra, transformer

CONFIG = transformer.config_of_size("nano", vocab_size=60, max_length=16)
IDS = np.random.RandomState(0).randint(5, 60, (2, 16)).astype(np.int32)
MASK = np.ones((2, 16), bool)
POSITIONS = np.asarray([[1, 5, 16], [2, 16, 16]], np.int32)
INPUTS = (IDS, MASK, POSITIONS)


def test_corrective_logits_are_eq_10():
    """Hidden state of the masked position times the token's embedding, plus a bias."""
    discriminator = electra.Discriminator(CONFIG)
    params = two_halves.init_of(discriminator, *INPUTS, seed=1)

    @jax.jit
    def by_hand(params):
        encoder = transformer.Encoder(CONFIG)
        hidden = transformer.Embeddings(CONFIG).apply(
            {"params": params["embeddings"]}, IDS, True
        )
        return encoder.apply({"params": params["encoder"]}, hidden, MASK, True)

    hidden = np.asarray(by_hand(params))
    table = np.asarray(params["embeddings"]["word_embeddings"]["embedding"])
    bias = np.asarray(params["clm_head"]["bias"])
    _, clm = jax.jit(discriminator.apply)({"params": params}, *INPUTS)
    clm = np.asarray(clm)
    for row, slot in np.argwhere(POSITIONS < 16):
        want = hidden[row, POSITIONS[row, slot]] @ table.T + bias
        np.testing.assert_allclose(clm[row, slot], want, atol=1e-4)


def test_disentangled_embeddings_learn_apart_from_the_output_layer():
    """The deltas all that the encoder learns, the table what its output layer does."""
    apart = electra.Discriminator(dataclasses.replace(CONFIG, disentangled=True))
    params = two_halves.init_of(apart, *INPUTS)

    def gradients(of, module, params):
        def total(params):
            outputs = module.apply({"params": params}, *INPUTS)
            return jnp.sum(outputs[of] ** 2), outputs

        return jax.jit(jax.grad(total, has_aux=True))(params)

    deltas = params["embeddings"]["word_deltas"]["embedding"]
    joined = dict(params["embeddings"])
    table = joined["word_embeddings"]["embedding"]
    joined.pop("word_deltas")
    joined = params | {
        "embeddings": joined | {"word_embeddings": {"embedding": table + deltas}}
    }
    rtd, outputs = gradients(0, apart, params)
    want, wanted = gradients(0, electra.Discriminator(CONFIG), joined)
    np.testing.assert_allclose(outputs[0], wanted[0], atol=1e-5)
    found = rtd["embeddings"]
    assert not found["word_embeddings"]["embedding"].any()
    np.testing.assert_allclose(
        found["word_deltas"]["embedding"],
        want["embeddings"]["word_embeddings"]["embedding"],
        atol=1e-5,
    )
    clm, _ = gradients(1, apart, params)
    assert clm["embeddings"]["word_embeddings"]["embedding"].any()


def test_the_papers_models_have_the_papers_sizes():
    """Counted without memory: the discriminator has the paper's 550 million.

    The generator has 277 million; the paper's "220 million" does not fit its own
    vocabulary of 250,002 pieces at width 768.
    """

    def millions(module, size):
        config = transformer.config_of_size(size, vocab_size=250_002, max_length=512)
        ids = jax.ShapeDtypeStruct((1, 512), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, 512), jnp.bool_)
        positions = jax.ShapeDtypeStruct((1, 79), jnp.int32)
        shapes = jax.eval_shape(
            module(config).init, jax.random.key(0), ids, mask, positions
        )
        return sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6

    assert millions(electra.Discriminator, "large") == pytest.approx(560, abs=2)
    assert millions(electra.Generator, "base") == pytest.approx(278, abs=1)
