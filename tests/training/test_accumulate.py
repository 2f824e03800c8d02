import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import accumulate

B = 6
BATCH = {
    "x": np.random.RandomState(0).randn(B, 3).astype(np.float32),
    "weight": np.array([0, 1, 1, 0, 3, 2], np.float32),
}
PARAMS = {"w": np.array([0.5, -1, 2], np.float32)}


def loss(params, rows, number):
    """The part of a weighted mean of squares."""
    errors = jnp.tanh(rows["x"] @ params["w"]) ** 2
    part = jnp.sum(errors * rows["weight"]) / BATCH["weight"].sum()
    return accumulate.Outcome(part, {"count": len(errors)}, {"x": rows["x"] * 2})


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_and_outcomes_are_those_of_the_batch(micro_batches):
    def whole(params):
        return loss(params, BATCH, None).loss

    wanted, gradient = jax.value_and_grad(whole)(PARAMS)
    fn = jax.jit(accumulate.gradients, static_argnums=(0, 3))
    grads, outcome = fn(loss, PARAMS, BATCH, micro_batches)
    np.testing.assert_allclose(grads["w"], gradient["w"], rtol=1e-5)
    total = jax.jit(accumulate.total, static_argnums=(0, 3))
    for found in (outcome, total(loss, PARAMS, BATCH, micro_batches)):
        np.testing.assert_allclose(found.loss, wanted, rtol=1e-6)
        assert found.sums["count"] == B
        np.testing.assert_array_equal(found.rows["x"], BATCH["x"] * 2)  # in order


def test_every_micro_batch_has_its_own_key_and_the_only_one_the_batchs():
    def draw(params, rows, number):
        key = accumulate.key(jax.random.key(3), number)
        bits = jax.random.uniform(key, (len(rows),))
        return accumulate.Outcome(jnp.sum(params), (), bits)

    alone = accumulate.total(draw, jnp.ones(2), jnp.zeros(B), 1).rows
    np.testing.assert_array_equal(alone, jax.random.uniform(jax.random.key(3), (B,)))
    apart = accumulate.total(draw, jnp.ones(2), jnp.zeros(B), 2).rows
    for number in range(2):
        own = jax.random.uniform(
            jax.random.fold_in(jax.random.key(3), number), (B // 2,)
        )
        np.testing.assert_array_equal(apart[number::2], own)
