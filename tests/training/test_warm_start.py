"""A warm start: what trains when, and the priors of new heads."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees

from nebula_jax.training import optimizers, warm_start
from nebula_jax.training import state as train_state

V, LAYERS, STEPS, PEAK = 7, 2, 20, 1e-2
INNER = optimizers.adam(lambda _: 1.0, weight_decay=0.1)


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def drawn(*shape):
        return jax.random.normal(next(keys), shape)

    return {
        "embeddings": {"word_embeddings": {"embedding": drawn(V, 3)}},
        "encoder": {f"layer_{i}": {"output": {"kernel": drawn(3, 3)}} for i in (0, 1)},
        "clm_head": {"bias": jnp.zeros(V)},
        "rtd_head": {"output": {"kernel": drawn(3, 1), "bias": jnp.zeros(1)}},
    }


def optimizer_of(config, peak=PEAK, warmup_steps=2, clip_norm=0.0):
    return warm_start.optimizer(
        config,
        INNER,
        peak=peak,
        warmup_steps=warmup_steps,
        steps=STEPS,
        layers=LAYERS,
        clip_norm=clip_norm,
    )


def seen(words=None, replaced=(0, 0)):
    words = jnp.zeros(V) if words is None else jnp.asarray(words, jnp.float32)
    return warm_start.Seen(words, jnp.asarray(replaced, jnp.float32))


def taken(config, steps, what=None, **settings):
    """Every state of a run whose gradient is all ones, from step 0 on."""
    optimizer = optimizer_of(config, **settings)
    state = train_state.create(parameters(), optimizer, jax.random.key(1))
    step = jax.jit(
        lambda state, what: state.apply_gradients(
            jax.tree.map(jnp.ones_like, state.params),
            optimizer,
            {"loss": jnp.zeros(())},
            seen=what,
        )[0]
    )
    states = [state]
    for number in range(steps):
        states.append(step(states[-1], seen() if what is None else what(number)))
    return states


def layer(state, number):
    return np.asarray(state.params["encoder"][f"layer_{number}"]["output"]["kernel"])


def table(state):
    return np.asarray(state.params["embeddings"]["word_embeddings"]["embedding"])


@pytest.mark.parametrize("warmup", [0, 6])
def test_a_rate_that_begins_at_once_is_linear_decay(warmup):
    decay = optimizers.linear_decay(PEAK, warmup, STEPS)
    for step in range(STEPS + 1):
        found = warm_start.rate(jnp.int32(step), 0, PEAK, warmup, STEPS)
        np.testing.assert_allclose(found, decay(step), rtol=1e-6)


def test_a_rate_that_begins_later_rises_from_there_and_ends_with_the_run():
    rates = [
        float(warm_start.rate(jnp.int32(step), 8, PEAK, 4, STEPS)) for step in range(21)
    ]
    assert rates[:9] == [0.0] * 9
    assert rates[10] == pytest.approx(PEAK / 2)
    assert max(rates) == rates[12] == pytest.approx(PEAK)
    assert rates[16] == pytest.approx(PEAK / 2)
    assert rates[20] == 0.0
    assert warm_start.rate(jnp.int32(5), STEPS + 1, PEAK, 4, STEPS) == 0


def test_heads_train_alone_and_the_encoder_then_begins_as_at_step_0():
    """As an encoder without heads does, to which the first steps never happened."""
    alone = 5
    config = warm_start.Config(head_warmup_steps=alone)
    states = taken(config, alone + 4)
    for state in states[: alone + 1]:
        np.testing.assert_array_equal(layer(state, 0), layer(states[0], 0))
        np.testing.assert_array_equal(table(state), table(states[0]))
    heads = [np.asarray(state.params["clm_head"]["bias"]) for state in states]
    assert all(np.all(a > b) for a, b in itertools.pairwise(heads[1:]))

    rates = optimizers.linear_decay(PEAK, 2, STEPS - alone)
    oracle = optimizers.adam(rates, weight_decay=0.1)
    encoder = {"encoder": states[-1].params["encoder"]}
    want = stepped(oracle, {"encoder": parameters()["encoder"]}, 4)
    trees.assert_close(encoder, want, rtol=1e-6)


def stepped(optimizer, params, steps):
    """Parameters after steps of an optimizer whose gradient is all ones."""
    opt_state, ones = optimizer.init(params), jax.tree.map(jnp.ones_like, params)
    update = jax.jit(optimizer.update)
    for _ in range(steps):
        updates, opt_state = update(ones, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_without_a_warm_up_it_is_the_same_optimizer():
    """But for the settings that it is made for: the heads' own rate, here the same."""
    config = warm_start.Config(head_learning_rate=PEAK)
    (*_, last) = taken(config, 6, clip_norm=0.5)
    rates = optimizers.linear_decay(PEAK, 2, STEPS)
    oracle = optimizers.adam(rates, weight_decay=0.1, clip_norm=0.5)
    want = stepped(oracle, parameters(), 6)
    trees.assert_close(last.params, want, rtol=1e-6)


def test_what_does_not_train_does_not_count_for_the_norm():
    """Clipping by the norm of all would leave the heads next to nothing."""
    config = warm_start.Config(head_warmup_steps=4)
    sgd = optax.sgd(1.0)
    optimizer = warm_start.optimizer(
        config, sgd, peak=1.0, warmup_steps=1, steps=9, layers=2, clip_norm=1.0
    )
    params = parameters()
    grads = jax.tree.map(jnp.ones_like, params)
    grads["encoder"] = jax.tree.map(lambda leaf: leaf * 1e6, grads["encoder"])
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    updates, _ = update(grads, state, params, step=jnp.int32(1), seen=seen())
    heads = {name: updates[name] for name in ("clm_head", "rtd_head")}
    assert optax.tree.norm(heads) == pytest.approx(1.0)
    assert optax.tree.norm(updates["encoder"]) == 0


def test_lower_layers_learn_more_slowly_and_frozen_embeddings_never():
    config = warm_start.Config(
        layer_decay=0.5, head_learning_rate=1.0, freeze_embeddings=True
    )
    states = taken(config, 3)
    moved = [np.abs(layer(states[-1], i) - layer(states[0], i)).mean() for i in (0, 1)]
    assert 0.4 < moved[0] / moved[1] < 0.6  # decay of weights differs a little
    np.testing.assert_array_equal(table(states[-1]), table(states[0]))
    names = jax.tree_util.tree_leaves_with_path(states[0].opt_state)
    assert not any("embeddings" in jax.tree_util.keystr(path) for path, _ in names)
    gradient = jax.grad(
        lambda params: jnp.sum(
            warm_start.without_frozen(config, params)["embeddings"]["word_embeddings"][
                "embedding"
            ]
        )
    )(parameters())
    assert optax.tree.norm(gradient) == 0


def test_biases_come_to_the_frequencies_that_were_seen_while_heads_train_alone():
    counts = np.array([0, 0, 3, 1, 0, 8, 2])

    def what(number):
        late = 1 if number < 3 else 100  # not counted: the encoder trains already
        return seen(words=counts * late, replaced=(3 * late, 17))

    config = warm_start.Config(head_warmup_steps=3, head_priors=True)
    states = taken(config, 5, what, peak=1e-30)
    total = 3 * counts + warm_start.SMOOTHING
    for state in states[3:]:
        bias = state.params["clm_head"]["bias"]
        np.testing.assert_allclose(jax.nn.softmax(bias), total / total.sum(), rtol=1e-5)
        (odds,) = np.asarray(state.params["rtd_head"]["output"]["bias"])
        expected = np.log((51 + warm_start.SMOOTHING) / (9 + warm_start.SMOOTHING))
        assert odds == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(states[3].opt_state.seen.words, 3 * counts)
    np.testing.assert_array_equal(states[5].opt_state.seen.words, 3 * counts)


def test_words_are_counted_where_there_is_text():
    ids = jnp.array([[5, 6, 2], [5, 0, 0]])
    found = warm_start.words_seen(ids, V)
    np.testing.assert_array_equal(found, [0, 0, 0, 0, 0, 2, 1])


def test_priors_without_steps_to_count_in_are_refused():
    with pytest.raises(ValueError, match="head_priors counts"):
        warm_start.Config(head_priors=True)
