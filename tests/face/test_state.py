"""A state takes the steps that optax takes by itself, if gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nebula_jax as nebula
from nebula_jax.face import values
from nebula_jax.runtime.records import progress

PARAMS = {"kernel": jnp.ones((2, 2)), "frozen": jnp.ones(2), "count": jnp.array(3)}


def is_trained(path):
    return path != "frozen"


def test_it_takes_the_steps_of_optax():
    optimizer = optax.adamw(0.1)
    params = {"kernel": PARAMS["kernel"]}
    state, opt = nebula.state(params, optimizer), optimizer.init(params)
    for number in range(3):
        grads = {"kernel": jnp.full((2, 2), number - 0.5)}
        updates, opt = jax.jit(optimizer.update)(grads, opt, params)
        params = optax.apply_updates(params, updates)
        state = state.apply(grads)
    np.testing.assert_allclose(state.params["kernel"], params["kernel"], rtol=1e-6)
    assert int(state.step) == 3


def test_what_does_not_train_stays_and_integers_too():
    state = nebula.state(PARAMS, optax.sgd(1.0), is_trained=is_trained)
    after = state.apply({"kernel": jnp.ones((2, 2))})
    assert PARAMS["kernel"].min() == 1  # the caller's own
    assert after.params["kernel"].max() == 0
    np.testing.assert_array_equal(after.params["frozen"], PARAMS["frozen"])
    assert int(after.params["count"]) == 3
    assert list(state.trained) == ["kernel"]
    # The gradient of a whole tree, as `jax.grad` returns it with `allow_int`.
    after = after.apply(jax.tree.map(jnp.ones_like, PARAMS))
    np.testing.assert_array_equal(after.params["frozen"], PARAMS["frozen"])


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"v": jnp.ones(2)}, r"\['w'\] float32\[2\], the gradient has \['v'\]"),
        ({"w": jnp.ones(2), "v": jnp.ones(2)}, "the gradient has"),
        ({"w": jnp.ones(())}, r"\['w'\] float32\[\]"),
        (jnp.ones(2), "the gradient has"),
    ],
)
def test_a_gradient_of_other_parameters_is_named(grads, words):
    state = nebula.state({"w": jnp.ones(2)}, optax.adam(0.1))
    with pytest.raises(nebula.errors.SettingsError, match=rf"^state\.apply.*{words}"):
        state.apply(grads)
    assert state.apply({"w": jnp.ones(2, jnp.bfloat16)}).step == 1


def test_where_nothing_trains_the_paths_are_named():
    with pytest.raises(nebula.errors.SettingsError, match=r"^is_trained .* layers/0$"):
        nebula.state(
            {"layers": [jnp.ones(2)]}, optax.sgd(1.0), is_trained=lambda path: False
        )
    assert nebula.state({"count": jnp.array(3)}, optax.sgd(1.0)).step == 0


def test_a_gradient_that_is_not_finite_changes_nothing():
    state = nebula.state({"w": jnp.ones(2)}, optax.adam(0.1))
    after = state.apply({"w": jnp.array([1.0, jnp.nan])})
    assert not after.is_finite
    np.testing.assert_array_equal(after.params["w"], np.ones(2))
    assert after.apply({"w": jnp.ones(2)}).is_finite


def test_parameters_that_a_rate_makes_infinite_are_not_saved():
    skips = progress.Skips("worker:0", allowed=1)
    state = nebula.state({"w": jnp.ones(2)}, optax.sgd(jnp.inf))
    skips.check(values.arrays((state,)))
    state = state.apply({"w": jnp.ones(2)})
    skips.take(1, {"is_finite": state.is_finite})
    with pytest.raises(progress.NonfiniteError, match="has made parameters"):
        skips.check(values.arrays((state,)))
