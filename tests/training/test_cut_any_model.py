"""Halves whose parameters are no nested dicts, each against the uncut gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_halves
from flax import nnx

from nebula_jax.communication import codec
from nebula_jax.face import cut as face_cut
from nebula_jax.training import cut, partition

IDENTITY = codec.identity()
B, INPUTS, D = 6, 5, 4
X = np.random.RandomState(0).randn(B, INPUTS).astype(np.float32)
Y = np.sin(X.sum(-1))


def rows(seed, *shape):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32) / 2


class Layers:
    """Plain JAX: a list of tuples."""

    params = (
        [(rows(1, INPUTS, D), rows(2, D)), (rows(3, D, D), rows(4, D))],
        [(rows(5, D, D), rows(6, D)), (rows(7, D, 1), rows(8, 1))],
    )
    frozen = ("0/1", "1/0")

    @staticmethod
    def apply(half, params, x):
        for kernel, bias in params:
            x = jnp.tanh(x @ kernel + bias[None])
        return x


class Matrix:
    """A bare array for each half."""

    params = rows(1, INPUTS, D), rows(2, D, 1)
    frozen = ()

    @staticmethod
    def apply(half, params, x):
        return jnp.tanh(x @ params)


class Nnx:
    """Modules of NNX: their state is differentiated, what they are is a constant."""

    def module(inputs, outputs, seed):
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(
            nnx.Linear(inputs, D, rngs=rngs),
            jnp.tanh,
            nnx.Linear(D, outputs, rngs=rngs),
        )

    graphs, params = zip(
        nnx.split(module(INPUTS, D, 0)), nnx.split(module(D, 1, 1)), strict=True
    )
    frozen = ("layers/2/bias/value",)

    @classmethod
    def apply(cls, half, params, x):
        return nnx.merge(cls.graphs[half], params)(x)


@pytest.mark.parametrize("model", [Layers, Matrix, Nnx])
def test_gradients_are_the_uncut_models(model):
    def front(params, x, rng):
        return model.apply(0, params, x)

    def back(params, hidden, y, rng):
        return jnp.sum((model.apply(1, params, hidden)[:, 0] - y) ** 2) / B

    def is_trained(path):
        return path not in model.frozen

    @jax.jit
    def whole(params):
        return back(params[1], front(params[0], X, None), Y, None)

    halves = (
        cut.front(front, IDENTITY, IDENTITY, is_trained=is_trained),
        cut.back(back, IDENTITY, IDENTITY, is_trained=is_trained),
    )
    params, rng = model.params, jax.random.key(0)
    run = two_halves.Run(*halves, face_cut.spec(front, params[0], X[: B // 2]))
    micro_batches = zip(np.split(X, 2), np.split(Y, 2), strict=True)
    grads, *_ = run.step(params, micro_batches, [(rng, rng)] * 2)
    whole_grads = jax.grad(whole)(params)
    want = tuple(partition.split(each, is_trained)[0] for each in whole_grads)
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    two_halves.assert_close(grads, want)
    count = len(jax.tree.leaves(params))
    frozen = sum(len(jax.tree.leaves(each)) for each in want)
    assert frozen == count - 2 * len(model.frozen)
