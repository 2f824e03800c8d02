import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny_nli

from nebula_jax.data import tokenizers
from nebula_jax.models import classifier, pretrained
from nebula_jax.training import classification, partition
from nebula_jax.training import state as train_state

IDS = np.asarray([[2, 8, 9, 3, 10, 3], [2, 12, 3, 9, 3, 0]], np.int32)
LABELS = np.asarray([2, 0], np.int32)


OPTIMIZER = optax.sgd(0.1)
# Jitted once for all tests: most of their time is compilation.
step = jax.jit(classification.step, static_argnums=(0, 1, 2))
create = jax.jit(train_state.create, static_argnums=1)
predict = jax.jit(classification.predict, static_argnums=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tiny_nli.write_model(tmp_path_factory.mktemp("nli") / "model", layers=1)
    model, words = pretrained.load(folder), tokenizers.load(folder)
    config = classifier.config(model, words, dropout=0.0)
    return config, classifier.init(config, jax.random.key(0), model)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_is_that_of_the_mean_cross_entropy(made, micro_batches):
    config, params = made
    state = create(params, OPTIMIZER, jax.random.key(1))
    new, metrics = step(config, OPTIMIZER, micro_batches, state, {}, IDS, LABELS)

    def loss_of(params):
        log_p = jax.nn.log_softmax(classifier.logits(config, params, IDS))
        return -(log_p[0, 2] + log_p[1, 0]) / 2

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(params)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["tokens"] == 11
    jax.tree.map(
        lambda got, old, grad: np.testing.assert_allclose(
            got, old - 0.1 * grad, atol=1e-6
        ),
        *jax.device_get((new.params, params, grads)),
    )


def test_frozen_embeddings_stay_and_the_rest_learns_the_batch(made):
    config, params = made
    trained, frozen = partition.split(params, classification.is_trained)
    assert trained.keys() == {"encoder", "classifier"}
    assert frozen.keys() == {"embeddings"}
    optimizer = optax.adam(3e-3)
    state = create(trained, optimizer, jax.random.key(1))
    for _ in range(40):
        state, metrics = step(config, optimizer, 1, state, frozen, IDS, LABELS)
    assert metrics["loss"] < 0.1
    found = predict(config, partition.merge(state.params, frozen), IDS)
    np.testing.assert_array_equal(found.argmax(-1), LABELS)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


def test_a_step_has_dropout_and_a_prediction_none(made):
    config, params = made
    both = config, dataclasses.replace(config, dropout=0.5)
    losses = [
        step(each, OPTIMIZER, 1, state, {}, IDS, LABELS)[1]["loss"]
        for each in both
        for state in [create(params, OPTIMIZER, jax.random.key(1))]
    ]
    assert abs(losses[0] - losses[1]) > 1e-4
    np.testing.assert_array_equal(*[predict(each, params, IDS) for each in both])


def test_a_step_moves_nothing_between_host_and_device(made):
    config, params = made
    state = create(params, OPTIMIZER, jax.random.key(1))
    batch = jax.device_put((IDS, LABELS))
    state, _ = step(config, OPTIMIZER, 1, state, {}, *batch)
    with jax.transfer_guard("disallow"):
        state, _ = step(config, OPTIMIZER, 1, state, {}, *batch)
    assert state.step == 2
