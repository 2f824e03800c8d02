import dataclasses
import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.evaluation import leakage
from nebula_jax.models import transformer

# N vectors, D width, V pieces, L length, B rows.
V, D, L, LAYERS = 60, 32, 8, 2

PLM = transformer.Config(
    vocab_size=V, layers=LAYERS, width=D, heads=4, feed_forward=64, max_length=16
)


@pytest.fixture(scope="module")
def params():
    return drawn.masked_language_model(PLM)


def text(rows, length=L, seed=0):
    return np.random.RandomState(seed).randint(0, V, (rows, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def encode(layers, params, ids):
    config = dataclasses.replace(PLM, layers=layers)
    return transformer.hidden_states(config, params, ids, jnp.ones(ids.shape, bool))


@jax.jit
def by_position(params):
    """[L, V, D], the embedding of every piece at every position."""
    ids = jnp.broadcast_to(jnp.arange(V)[:, None], (V, L))
    hidden = transformer.Embeddings(PLM).apply(
        {"params": params["embeddings"]}, ids, True
    )
    return hidden.swapaxes(0, 1)


def share(guesses, labels):
    return np.mean(np.asarray(guesses) == labels)


def test_without_layers_and_codec_the_nearest_embedding_is_every_token(params):
    ids = text(20)
    hidden, tables = encode(0, params, ids), by_position(params)
    for position in range(L):
        guesses = leakage.nearest(hidden[:, position], tables[position])
        assert share(guesses, ids[:, position]) == 1.0


def test_noise_is_recovered_at_chance(params):
    random = np.random.RandomState(1)
    noise = random.randn(1500, D).astype(np.float32)
    labels = random.randint(0, V, 1500).astype(np.int32)
    table = np.asarray(by_position(params)[0])
    attacked, truth = noise[1000:], labels[1000:]
    own, key = (noise[:1000], labels[:1000]), jax.random.key(0)
    for guesses in (
        leakage.nearest(attacked, table),
        leakage.inverted(attacked, *own, table, key, steps=40),
    ):
        # 4 standard deviations of a guess.
        error = 4 * (1 / V * (1 - 1 / V) / len(truth)) ** 0.5
        assert abs(share(guesses, truth) - 1 / V) < error


def test_an_inverter_learns_a_rotation_that_the_nearest_embedding_cannot_undo(params):
    random = np.random.RandomState(2)
    table = np.asarray(by_position(params)[0])
    rotation = np.linalg.qr(random.randn(D, D))[0].astype(np.float32)
    labels = random.randint(0, V, 1500).astype(np.int32)
    hidden = (table @ rotation)[labels] + 0.02 * random.randn(1500, D)
    hidden = hidden.astype(np.float32)
    own, key = (hidden[:1000], labels[:1000]), jax.random.key(0)
    guesses = leakage.inverted(hidden[1000:], *own, table, key, steps=40)
    assert share(guesses, labels[1000:]) == 1.0
    assert share(leakage.nearest(hidden[1000:], table), labels[1000:]) < 0.2


def test_an_inverter_recovers_tokens_from_the_last_layer_beyond_chance(params):
    own, attacked = text(125, seed=3), text(60, seed=4)
    table = params["embeddings"]["word_embeddings"]["embedding"]
    hidden = jax.device_get(encode(LAYERS, params, np.concatenate([own, attacked])))
    before, after = (each.reshape(-1, D) for each in np.split(hidden, [125]))
    labels, key = own.reshape(-1), jax.random.key(5)
    guesses = leakage.inverted(after, before, labels, table, key, steps=40)
    most_frequent = np.bincount(labels).argmax()
    chance = share(most_frequent, attacked)
    assert share(guesses, attacked.reshape(-1)) > 8 * chance


def test_a_ridge_is_where_its_gradient_is_zero():
    random = np.random.RandomState(0)
    features, targets = random.randn(30, 5), random.randn(30, 3)
    features, targets = features.astype(np.float32), targets.astype(np.float32)
    weights = np.asarray(leakage.ridge(features, targets, 0.1))
    shift = 0.1 * 30 * np.mean(features**2)
    gradient = features.T @ (features @ weights - targets) + shift * weights
    np.testing.assert_allclose(gradient, 0, atol=1e-4)  # float32
