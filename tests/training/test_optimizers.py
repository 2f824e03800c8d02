import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@pytest.mark.parametrize(
    ("path", "factor"),
    [
        ("classifier/output/kernel", 1.0),
        ("encoder/layer_11/output/kernel", 0.8),
        ("encoder/layer_10/attention/query/bias", 0.8**2),
        ("encoder/layer_0/output_layer_norm/scale", 0.8**12),
        ("embeddings/word_embeddings/embedding", 0.8**13),
        ("embeddings/layer_norm/bias", 0.8**13),
    ],
)
def test_factors_are_ernies(path, factor):
    """algorithms.md, section 5: lr d^(n-i), embeddings d^(n+1), classifier d^0."""
    assert optimizers.layer_factor(path, 0.8, layers=12) == pytest.approx(factor)


def test_a_step_is_adams_times_the_factor():
    params = {
        "embeddings": {"word_embeddings": {"embedding": jnp.ones((3, 2))}},
        "encoder": {f"layer_{n}": {"output": {"kernel": jnp.ones(2)}} for n in (0, 1)},
        "classifier": {"output": {"bias": jnp.ones(3)}},
    }
    grads = jax.tree.map(lambda leaf: leaf * 0.3, params)
    plain = optimizers.adam(lambda step: 0.1)
    decayed = optax.chain(plain, optimizers.scale_by_layer(0.5, layers=2))
    want, _ = plain.update(grads, plain.init(params), params)
    got, _ = decayed.update(grads, decayed.init(params), params)
    factors = {
        "embeddings": {"word_embeddings": {"embedding": 0.125}},
        "encoder": {
            "layer_0": {"output": {"kernel": 0.25}},
            "layer_1": {"output": {"kernel": 0.5}},
        },
        "classifier": {"output": {"bias": 1.0}},
    }
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a, b * c, rtol=1e-6),
        got,
        want,
        factors,
    )


def test_a_decay_of_one_changes_nothing():
    updates = {"encoder": {"layer_0": {"output": {"kernel": jnp.full(2, 0.1)}}}}
    scale = optimizers.scale_by_layer(1.0, layers=2)
    got, _ = scale.update(updates, scale.init(updates))
    jax.tree.map(np.testing.assert_array_equal, got, updates)
