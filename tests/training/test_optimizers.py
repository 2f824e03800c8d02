import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import optimizers


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5), (100, 0.0)],
)
def test_the_learning_rate_rises_then_falls_to_zero(step, rate):
    schedule = optimizers.linear_decay(1.0, warmup_steps=10, total_steps=100)
    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-7),
        (2000, (1e-7 + 5e-4) / 2),
        (4000, 5e-4),
        (16_000, 2.5e-4),
        (400_000, 5e-5),
    ],
)
def test_the_learning_rate_falls_with_the_root_of_the_step(step, rate):
    schedule = optimizers.inverse_square_root()
    assert schedule(step) == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_odd_schedules_stay_finite(warmup):
    schedule = optimizers.linear_decay(1.0, warmup, total_steps=7)
    rates = [float(schedule(step)) for step in range(8)]
    assert np.isfinite(rates).all()
    assert max(rates) <= 1.0


def test_two_steps_are_adams_by_hand():
    optimizer = optimizers.adam(lambda step: 0.1)
    params = {"w": jnp.asarray([1.0, -2.0])}
    state = optimizer.init(params)
    m = v = np.zeros(2)
    want = np.asarray([1.0, -2.0])
    for t, g in enumerate((np.asarray([0.5, 2.0]), np.asarray([-1.0, 1.0])), start=1):
        updates, state = optimizer.update({"w": jnp.asarray(g)}, state, params)
        params = {"w": params["w"] + updates["w"]}
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        want = want - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
    np.testing.assert_allclose(params["w"], want, rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    clipped = optimizers.adam(lambda step: 1.0, clip_norm=1.0)
    plain = optimizers.adam(lambda step: 1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    big = {"a": jnp.asarray([30.0]), "b": jnp.asarray([40.0])}
    small = {"a": jnp.asarray([0.6]), "b": jnp.asarray([0.8])}
    got = clipped.update(big, clipped.init(params), params)[1]
    want = plain.update(small, plain.init(params), params)[1]
    np.testing.assert_allclose(got[1].mu["a"], want[1].mu["a"], rtol=1e-6)


def test_weight_decay_spares_biases_and_layer_norms():
    optimizer = optimizers.adam(lambda step: 0.1, weight_decay=0.5)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zero = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0)
