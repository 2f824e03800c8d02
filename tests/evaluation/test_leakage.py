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


def test_without_layers_and_codec_the_nearest_embedding_is_every_token(params):
    ids = text(20)
    hidden, tables = encode(0, params, ids), by_position(params)
    for position in range(L):
        guesses = jax.device_get(leakage.nearest(hidden[:, position], tables[position]))
        assert leakage.recovery(guesses, ids[:, position]) == (1.0, 1.0)


def test_noise_is_recovered_at_chance(params):
    random = np.random.RandomState(1)
    noise = random.randn(1500, D).astype(np.float32)
    labels = random.randint(0, V, 1500).astype(np.int32)
    table = np.asarray(by_position(params)[0])
    inverter = leakage.fit_inverter(
        noise[:1000], labels[:1000], table, jax.random.key(0), steps=40
    )
    attacked, truth = noise[1000:], labels[1000:]
    for guesses in (
        leakage.nearest(attacked, table),
        leakage.invert(inverter, attacked, table),
    ):
        found = leakage.recovery(jax.device_get(guesses), truth)
        # 4 standard deviations of a guess.
        for share, chance in zip(found, (1 / V, leakage.GUESSES / V), strict=True):
            assert abs(share - chance) < 4 * (chance * (1 - chance) / len(truth)) ** 0.5


def test_an_inverter_learns_a_rotation_that_the_nearest_embedding_cannot_undo(params):
    random = np.random.RandomState(2)
    table = np.asarray(by_position(params)[0])
    rotation = np.linalg.qr(random.randn(D, D))[0].astype(np.float32)
    labels = random.randint(0, V, 1500).astype(np.int32)
    hidden = (table @ rotation)[labels] + 0.02 * random.randn(1500, D)
    hidden = hidden.astype(np.float32)
    inverter = leakage.fit_inverter(
        hidden[:1000], labels[:1000], table, jax.random.key(0), steps=40
    )
    guesses = jax.device_get(leakage.invert(inverter, hidden[1000:], table))
    assert leakage.recovery(guesses, labels[1000:]).first == 1.0
    guesses = jax.device_get(leakage.nearest(hidden[1000:], table))
    assert leakage.recovery(guesses, labels[1000:]).first < 0.2


def test_an_inverter_recovers_tokens_from_the_last_layer_beyond_chance(params):
    own, attacked = text(125, seed=3), text(60, seed=4)
    table = params["embeddings"]["word_embeddings"]["embedding"]
    hidden = jax.device_get(encode(LAYERS, params, np.concatenate([own, attacked])))
    before, after = np.split(hidden, [125])
    inverter = leakage.fit_inverter(
        before.reshape(-1, D), own.reshape(-1), table, jax.random.key(5), steps=40
    )
    guesses = leakage.invert(inverter, after.reshape(-1, D), table)
    guesses, labels = jax.device_get(guesses), attacked.reshape(-1)
    found = leakage.recovery(guesses, labels)
    chance, _ = leakage.chance(own.reshape(-1), labels, V)
    assert found.first > 8 * chance.first
    assert found.among > 4 * chance.among


def test_recovery_and_chance_by_hand():
    guesses = np.asarray([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [9, 8, 7, 6, 5]])
    assert leakage.recovery(guesses, np.asarray([1, 1, 1])) == (1 / 3, 2 / 3)
    own = np.asarray([0] * 5 + [1] * 3 + [2, 3, 4, 5])
    most_frequent, unigram = leakage.chance(own, np.asarray([0, 0, 1, 5]), 10)
    assert most_frequent == (0.5, 0.75)
    assert unigram == pytest.approx((5 + 5 + 3 + 1) / 12 / 4)


def test_a_ridge_is_where_its_gradient_is_zero():
    random = np.random.RandomState(0)
    features, targets = random.randn(30, 5), random.randn(30, 3)
    features, targets = features.astype(np.float32), targets.astype(np.float32)
    weights = np.asarray(leakage.ridge(features, targets, 0.1))
    shift = 0.1 * 30 * np.mean(features**2)
    gradient = features.T @ (features @ weights - targets) + shift * weights
    np.testing.assert_allclose(gradient, 0, atol=1e-4)  # float32
