"""What the guide says about things that span a cut, over connections in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
import two_halves
from flax import nnx

import nebula_jax as nebula
from nebula_jax.communication import loopback
from nebula_jax.face import values

X = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)
IDS = np.random.default_rng(1).integers(7, size=(2, 4, 3))
OPTIMIZER = optax.sgd(0.2)


def both(front_role, back_role):
    """Runs two roles on the two ends of a line; returns what they return."""
    here, there = loopback.ends(seconds=60.0)
    two, one = two_halves.both(lambda: front_role(here), lambda: back_role(there))
    return one, two


def trained(half, params, batch, h, end, aux=None, steps=3):
    """The loop of a part; returns its state and line."""
    state, line = nebula.state(params, OPTIMIZER), half.open(end, h, aux=aux)
    for step in range(1, steps + 1):
        grads, line, _ = half.step(state.params, batch, None, step, line)
        state = state.apply(grads)
    return state, line


def test_a_table_that_both_parts_share_gets_both_gradients():
    def front(params, ids, rng):
        return {"hidden": params["table"][ids].mean(1), "table": params["table"]}

    def back(params, h, targets, rng):
        logits = (h["hidden"] @ params["w"]) @ h["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    table = {"table": jax.random.normal(jax.random.key(0), (7, 5))}
    own, targets = {"w": jnp.eye(5)}, list(IDS[..., 0])
    h = nebula.cut.spec(front, table, IDS[0])
    (one, _), (two, _) = both(
        lambda end: trained(nebula.cut.front(front), table, list(IDS), h, end),
        lambda end: trained(nebula.cut.back(back), own, targets, h, end),
    )

    def loss(params):
        sent = [front(params[0], ids, None) for ids in IDS]
        pairs = zip(sent, targets, strict=True)
        return sum(back(params[1], each, target, None) for each, target in pairs) / 2

    params = (table, own)
    for _ in range(3):
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, jax.grad(loss)(params))
    np.testing.assert_allclose(one.params["table"], params[0]["table"], atol=1e-6)
    np.testing.assert_allclose(two.params["w"], params[1]["w"], atol=1e-6)


def test_a_dropout_of_nnx_draws_by_the_key_of_step_and_micro_batch():
    class Stem(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(5, 4, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(self.linear(x), rngs=rngs)

    graph, begin = nnx.split(Stem(nnx.Rngs(0)), nnx.Param)
    key, head = jax.random.key(3), {"w": jnp.ones((4, 1))}

    def front(params, x, rng):
        return nnx.merge(graph, params)(x, rngs=nnx.Rngs(dropout=rng))

    def back(params, h, nothing, rng):
        return jnp.mean((h @ params["w"]) ** 2)

    def step(half, params, batch, end):
        line = half.open(end, nebula.cut.spec(front, begin, X[0]))
        return half.step(params, batch, key, 1, line)[0]

    found, _ = both(
        lambda end: step(nebula.cut.front(front), begin, list(X), end),
        lambda end: step(nebula.cut.back(back), head, [None, None], end),
    )

    def loss(params):
        keys = [jax.random.fold_in(jax.random.fold_in(key, 1), n) for n in range(2)]
        sent = [front(params, x, rng) for x, rng in zip(X, keys, strict=True)]
        return sum(back(head, h, None, None) for h in sent) / 2

    trees.assert_close(found, jax.grad(loss)(begin), atol=1e-6)


def test_a_module_of_equinox_is_split_as_the_guide_says():
    """Its functions are leaves, its sizes are static; dropout takes the part's key."""
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 2)
    layers = [eqx.nn.MLP(5, 4, 8, 1, key=keys[0]), eqx.nn.Dropout(0.5)]
    models = eqx.nn.Sequential(layers), eqx.nn.Linear(4, 1, key=keys[1])
    (one, static), (two, static_back) = (
        eqx.partition(each, eqx.is_array) for each in models
    )

    def front(params, x, rng):
        rngs = jax.random.split(jax.random.key(7), len(x)) if rng is None else rng
        module = eqx.combine(params, static)
        return jax.vmap(lambda row, key: module(row, key=key))(x, rngs)

    def back(params, h, nothing, rng):
        return jnp.mean((jax.vmap(eqx.combine(params, static_back))(h) - 1) ** 2)

    h = nebula.cut.spec(lambda params, x, rng: front(params, x, None), one, X[0])
    (first, _), (last, _) = both(
        lambda end: trained(nebula.cut.front(front), one, list(X), h, end),
        lambda end: trained(nebula.cut.back(back), two, [None, None], h, end),
    )

    def loss(params):
        sent = [front(params[0], x, None) for x in X]
        return sum(back(params[1], each, None, None) for each in sent) / 2

    params = one, two
    for _ in range(3):
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, jax.grad(loss)(params))
    found = first.params, last.params
    trees.assert_close(found, params, atol=1e-6)
    saved = values.restored(first, values.arrays(first))
    assert jax.tree.structure(saved) == jax.tree.structure(first)
    with pytest.raises(nebula.errors.SettingsError, match=r"as eqx\.partition"):
        nebula.state(models[0], OPTIMIZER)


def test_held_out_data_cross_on_a_channel_of_their_own():
    def front(params, x, rng):
        return x @ params["w"]

    def back(params, h, nothing, rng):
        return jnp.mean((h @ params["w"]) ** 2)

    begin = {"w": jnp.ones((5, 4))}
    h = nebula.cut.spec(front, begin, X[0])

    def front_role(end):
        half = nebula.cut.front(front)
        line = half.open(end, h)
        held_out = end.sender("held out", h, nebula.codecs.identity())
        half.step(begin, list(X), None, 1, line)
        held_out.send(1, front(begin, X[0], None))

    def back_role(end):
        half = nebula.cut.back(back)
        line = half.open(end, h)
        held_out = end.receiver("held out", h, nebula.codecs.identity())
        half.step({"w": jnp.ones((4, 1))}, [None, None], None, 1, line)
        return held_out.recv(1)

    _, received = both(front_role, back_role)
    np.testing.assert_allclose(received, X[0] @ np.ones((5, 4)), rtol=1e-5)
