import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nebula_jax.training import optimizers
from nebula_jax.training import state as train_state

GOOD = {"kernel": [[1.0, -2.0]], "bias": [0.5]}


@functools.cache
def begun(rate=0.1, **settings):
    """A state at step 0, and a jitted function that takes a step."""
    optimizer = optimizers.adam(lambda step: jnp.float32(rate), **settings)

    @jax.jit
    def step(state, grads, loss):
        grads = jax.tree.map(jnp.float32, grads, is_leaf=lambda x: isinstance(x, list))
        return state.apply_gradients(grads, optimizer, {"loss": loss, "tokens": 3})

    params = jax.tree.map(jnp.float32, GOOD, is_leaf=lambda x: isinstance(x, list))
    return train_state.create(params, optimizer, jax.random.key(0)), step


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grads", "loss"),
    [
        (GOOD, np.nan),
        (GOOD, np.inf),
        ({"kernel": [[np.nan, 0.0]], "bias": [0.0]}, 2.0),
        ({"kernel": [[0.0, 0.0]], "bias": [-np.inf]}, 2.0),
        # Its square, a moment of Adam's, would be Inf, and stay so.
        ({"kernel": [[1e30, 0.0]], "bias": [0.0]}, 2.0),
    ],
)
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(grads, loss, clip_norm):
    state, step = begun(clip_norm=clip_norm)
    before, metrics = step(state, GOOD, 2.0)
    assert metrics == {"loss": 2.0, "tokens": 3, "is_finite": True}
    after, metrics = step(before, grads, loss)
    assert not metrics["is_finite"]
    assert after.step == before.step + 1
    jax.tree.map(np.testing.assert_array_equal, after.replace(step=before.step), before)
    want, _ = step(before, GOOD, 2.0)
    got, metrics = step(after, GOOD, 2.0)
    assert metrics["is_finite"]
    jax.tree.map(np.testing.assert_array_equal, got.replace(step=want.step), want)


def test_a_gpu_takes_the_same_steps(monkeypatch):
    """By a choice, where a condition would have its host wait."""
    (state, step), bad = begun(), {"kernel": [[np.nan, 0.0]], "bias": [0.0]}
    want = step(step(state, GOOD, 2.0)[0], bad, 2.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    begun.cache_clear()
    state, step = begun()
    got = step(step(state, GOOD, 2.0)[0], bad, 2.0)
    begun.cache_clear()
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not got[1]["is_finite"]


@pytest.mark.parametrize(("size", "is_finite"), [(1.0, True), (np.nan, False)])
def test_a_part_without_a_loss_of_its_own_records_none(size, is_finite):
    state, _ = begun()
    grads = jax.tree.map(lambda leaf: size * jnp.ones_like(leaf), state.params)
    optimizer = optimizers.adam(lambda step: jnp.float32(0.1))
    _, metrics = state.apply_gradients(grads, optimizer, {"tokens": 3})
    assert metrics == {"tokens": 3, "is_finite": is_finite}


def test_a_rate_that_makes_parameters_infinite_is_said():
    before, step = begun(rate=3e38)
    after, metrics = step(before, GOOD, 2.0)
    assert not metrics["is_finite"]
    assert not np.isfinite(optax.tree.norm(after.params))


def test_a_donated_state_is_updated_in_place():
    """No second copy of parameters and moments is made, which costs most of a step."""
    optimizer = optimizers.adam(lambda step: jnp.float32(0.1))
    step = jax.jit(
        lambda state, grads: state.apply_gradients(grads, optimizer, {}),
        donate_argnums=0,
    )
    params = {"w": jnp.ones((512, 512))}
    state = train_state.create(params, optimizer, jax.random.key(0))
    used = step.lower(state, params).compile().memory_analysis()
    assert used.temp_size_in_bytes < 2 * params["w"].nbytes


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_at_another_step_the_rate_is_that_of_one_that_took_them_all(name):
    """And the next step is what its gradient makes of the moments that there are."""
    rates = []

    def rate(count):
        return jnp.float32(0.1) / (1 + count)

    optimizer = optimizers.BY_NAME[name](rate, clip_norm=1.0)
    grads = {"encoder": {"layer_0": {"output": {"kernel": jnp.ones((2, 2))}}}}
    step = jax.jit(
        lambda state: state.apply_gradients(
            grads, optimizer, {"loss": jnp.float32(1.0)}
        )[0],
        donate_argnums=0,
    )

    def taken(at):
        params = jax.tree.map(jnp.ones_like, grads)
        state = step(train_state.create(params, optimizer, jax.random.key(0)))
        state = state if at is None else state.at_step(at)
        before = jax.device_get(state.params)
        rng = jax.device_get(jax.random.key_data(state.key()))
        after = step(state)
        rates.append(int(after.step))
        moved = jax.tree.map(lambda a, b: a - b, before, jax.device_get(after.params))
        return jax.tree.leaves(moved)[0], rng

    (near, key), (far, other) = taken(None), taken(9)
    assert rates == [2, 10]
    np.testing.assert_allclose(near * 2, far * 10, rtol=1e-4)
    assert not np.array_equal(key, other)
    assert np.array_equal(taken(1)[0], near)
