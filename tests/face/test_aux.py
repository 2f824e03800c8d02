"""Auxiliary state of parts: a BatchNorm on both sides is that of the uncut model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import two_halves
from flax import linen as nn
from flax import nnx

import nebula_jax as nebula
from nebula_jax import errors
from nebula_jax.communication import codec, loopback
from nebula_jax.face import cut as face_cut
from nebula_jax.training import cut

IDENTITY = codec.identity()
COUNT, B, INPUTS, D = 3, 4, 5, 4  # micro-batches, examples of each
X = np.random.RandomState(0).randn(COUNT, B, INPUTS).astype(np.float32)
Y = np.sin(X.sum(-1)).astype(np.float32)
HIDDEN = jax.ShapeDtypeStruct((B, D), jnp.float32)


class Module(nn.Module):
    """A module of Linen: statistics are a collection beside the parameters."""

    outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
        return nn.tanh(nn.Dense(self.outputs)(x))


MODULES = Module(D), Module(1)


def init(half, x):
    variables = MODULES[half].init(jax.random.key(half), x)
    return variables["params"], variables["batch_stats"]


def apply(half, params, stats, x):
    variables = {"params": params, "batch_stats": stats}
    out, new = MODULES[half].apply(variables, x, mutable=["batch_stats"])
    return out, new["batch_stats"]


def front(params, stats, x, rng):
    return apply(0, params, stats, x)


def back(params, stats, hidden, y, rng):
    out, stats = apply(1, params, stats, hidden)
    loss = jnp.mean((out[:, 0] - y) ** 2)
    return (loss, {"positive": jnp.sum(out > 0)}), stats


def uncut(params, stats):
    """The whole model's gradients, metrics and statistics: means of micro-batches."""

    @jax.jit
    def loss_of(params, stats):
        total, positive = 0.0, 0
        for x, y in zip(X, Y, strict=True):
            hidden, first = front(params[0], stats[0], x, None)
            (loss, metrics), last = back(params[1], stats[1], hidden, y, None)
            total, stats = total + loss / COUNT, (first, last)
            positive += metrics["positive"] / COUNT
        return total, (positive, stats)

    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, (positive, stats)), grads = gradient(params, stats)
    return grads, {"loss": loss, "positive": positive}, stats


def test_statistics_after_a_split_step_are_the_uncut_models():
    fresh = init(0, X[0]), init(1, np.zeros((B, D), np.float32))
    params, stats = zip(*fresh, strict=True)
    grads, metrics, new_stats = uncut(params, stats)
    assert face_cut.spec(front, params[0], X[0], aux=stats[0]) == HIDDEN
    parts = face_cut.front(front, has_aux=True), face_cut.back(back, has_aux=True)
    ends = loopback.ends(seconds=60.0)
    lines = [
        part.open(end, HIDDEN, aux=aux)
        for part, end, aux in zip(parts, ends, stats, strict=True)
    ]
    last, first = two_halves.both(
        lambda: parts[0].step(params[0], list(X), None, 1, lines[0]),
        lambda: parts[1].step(params[1], list(Y), None, 1, lines[1]),
    )
    two_halves.assert_close((first[0], last[0]), grads)
    two_halves.assert_close((first[1].aux, last[1].aux), new_stats)
    two_halves.assert_close(last[2], metrics)
    apart = jax.tree.map(lambda a, b: abs(a - b).max(), new_stats, stats)
    assert min(jax.tree.leaves(apart)) > 1e-3  # every statistic has moved


class Dropped(nnx.Module):
    """A module whose generator is a part of its state."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(INPUTS, D, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(x))


def test_the_state_of_a_generator_travels_as_auxiliary_state():
    graph, params, rest = nnx.split(Dropped(nnx.Rngs(0)), nnx.Param, ...)

    def front(params, rest, x, rng):
        module = nnx.merge(graph, params, rest)
        return module(x), nnx.split(module, nnx.Param, ...)[2]

    assert face_cut.spec(front, params, X[0], aux=rest) == HIDDEN


def test_a_generator_among_the_parameters_is_refused():
    """Each step would draw what the one before drew, with no word of it."""
    graph, params = nnx.split(Dropped(nnx.Rngs(0)))
    half = face_cut.front(lambda params, x, rng: nnx.merge(graph, params)(x))
    line = half.open(loopback.ends()[0], HIDDEN)
    for call in (
        lambda: face_cut.spec(half.fn, params, X[0]),
        lambda: half.step(params, list(X), None, 1, line),
        lambda: nebula.state(params, optax.sgd(0.1)),
        lambda: nebula.state(Dropped(nnx.Rngs(0)), optax.sgd(0.1)),
    ):
        with pytest.raises(errors.SettingsError, match=r"rngs=nnx\.Rngs\(dropout=rng"):
            call()


def test_what_is_no_auxiliary_state_is_named():
    params, stats = init(0, X[0])

    def run(fn, aux):
        half = cut.front(fn, IDENTITY, IDENTITY, has_aux=True)
        states = half.init_states(HIDDEN, aux=aux)
        half.forward(params, X[0], None, states, 1)

    words = r"returns \(what it returns otherwise, aux\), not"
    with pytest.raises(TypeError, match=words):
        run(lambda *given: front(*given)[0], stats)

    def returns_the_collection(*given):
        hidden, stats = front(*given)
        return hidden, {"batch_stats": stats}

    words = r"goes in as \{'BatchNorm_0'.* and comes out as \{'batch_stats'"
    with pytest.raises(TypeError, match=words):
        run(returns_the_collection, stats)
    half = cut.front(front, IDENTITY, IDENTITY, has_aux=True)
    with pytest.raises(TypeError, match="begins with one, others with none"):
        half.init_states(HIDDEN)
    half = cut.back(lambda *given: 0.0, IDENTITY, IDENTITY)
    with pytest.raises(TypeError, match="has_aux=False"):
        half.init_states(HIDDEN, aux=stats)
