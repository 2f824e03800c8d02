"""The cut against the whole model's gradient, and the chain of codecs done by hand."""

import functools
import logging

import drawn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_halves
from two_halves import L

from nebula_jax.communication import codec, codecs, selector
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import cut, partition

IDENTITY = codec.identity()
NO_STATES = cut.States()


def run_of(forward=IDENTITY, backward=IDENTITY, front=two_halves.front, **settings):
    """Both halves around codecs; `has_loss` is of a front that has one."""
    has_loss = settings.pop("has_loss", False)
    spec = two_halves.spec_of(2, front, has_loss=has_loss)
    front = cut.front(front, forward, backward, has_loss=has_loss, **settings)
    back = cut.back(two_halves.back, forward, backward, **settings)
    return two_halves.Run(front, back, spec)


def data(count=1):
    """The parameters of both halves, a batch in pieces, and a function for keys: each
    is used once, so whoever computes the same again makes the keys again."""
    micro_batches = two_halves.pieces(two_halves.batch(), count)
    return two_halves.init(), micro_batches, functools.partial(two_halves.keys, count)


@functools.partial(jax.jit, static_argnames="front")
def whole_gradient(params, micro_batches, keys, front=two_halves.front):
    return jax.grad(two_halves.whole_loss)(params, micro_batches, keys, front)


@pytest.mark.parametrize("count", [1, 2])
def test_micro_batches_add_up_to_the_whole_models_gradient(count):
    params, micro_batches, keys = data(count)
    grads, own, metrics = run_of().step(params, micro_batches, keys())
    two_halves.assert_close(grads, whole_gradient(params, micro_batches, keys()))
    assert own == 0
    loss = two_halves.whole_loss(params, micro_batches, keys())
    np.testing.assert_allclose(sum(m["loss"] for m in metrics), loss, rtol=1e-6)


def test_the_loss_is_a_metric_of_every_back():
    params, micro_batches, keys = data(2)
    wants = run_of().step(params, micro_batches, keys())[2]
    run = run_of()
    run.back = cut.back(lambda *given: two_halves.back(*given)[0], IDENTITY, IDENTITY)
    grads, _, metrics = run.step(params, micro_batches, keys())
    two_halves.assert_close(grads, whole_gradient(params, micro_batches, keys()))
    assert metrics == [{"loss": want["loss"]} for want in wants]


def test_a_front_may_have_a_loss_of_its_own():
    params, micro_batches, keys = data(2)
    front = two_halves.front_with_loss
    run = run_of(front=front, has_loss=True)
    grads, own, _ = run.step(params, micro_batches, keys())
    want = whole_gradient(params, micro_batches, keys(), front)
    two_halves.assert_close(grads, want)
    losses = [
        front(params[0], batch[0], rngs[0])[1]
        for batch, rngs in zip(micro_batches, keys(), strict=True)
    ]
    np.testing.assert_allclose(own, sum(losses), rtol=1e-6)
    assert own.dtype == jnp.float32


def test_a_front_in_half_precision_sends_and_receives_it():
    def fn(params, batch, rng):
        hidden = two_halves.front(params, batch, rng)
        hidden["h"] = hidden["h"].astype(jnp.bfloat16)
        return hidden, jnp.sum(hidden["h"]) / 100

    params, micro_batches, keys = data()
    run = run_of(front=fn, has_loss=True)
    grads, own, _ = run.step(params, micro_batches, keys())
    [(sent, answer)] = run.crossed
    assert sent.payload["h"].dtype == answer.payload["h"].dtype == jnp.bfloat16
    assert own.dtype == jnp.float32
    # bfloat16 keeps 8 bits, and the programs round in different places.
    want = whole_gradient(params, micro_batches, keys(), fn)
    two_halves.assert_close(grads, want, atol=2e-3)


FROZEN = ("first/kernel", "first/bias", "third/bias")


def test_frozen_parameters_get_no_gradient_and_the_others_the_same():
    seen = set()

    def is_trained(path):
        seen.add(path)
        return path not in FROZEN

    grads = assert_frozen(is_trained)
    assert set(grads[0]) == {"second"}
    assert set(grads[1]["third"]) == {"kernel"}
    layers = ("first", "second", "third", "last")
    assert seen == {f"{layer}/{n}" for layer in layers for n in ("kernel", "bias")}


def test_a_half_may_be_frozen_as_a_whole():
    grads = assert_frozen(lambda path: not path.startswith(("first", "second")))
    assert grads[0] == {}


def assert_frozen(is_trained):
    """What trains has the whole model's gradient; returns all gradients."""
    params, micro_batches, keys = data(2)
    grads, *_ = run_of(is_trained=is_trained).step(params, micro_batches, keys())
    want = whole_gradient(params, micro_batches, keys())
    two_halves.assert_close(
        grads, tuple(partition.split(w, is_trained)[0] for w in want)
    )
    return grads


def test_an_h_without_activations_is_named():
    front = cut.front(lambda params, batch, rng: batch["index"], IDENTITY, IDENTITY)
    params, [(batch, _)], _ = data()
    words = r"h has no floating-point array, so no gradient can come back: int32\(8,\)"
    with pytest.raises(TypeError, match=words):
        front.forward(params[0], batch, None, NO_STATES, 1)
    back = cut.back(two_halves.back, IDENTITY, IDENTITY)
    sent = selector.Selected({"index": batch["index"]})
    with pytest.raises(TypeError, match="no floating-point array"):
        back.step(params[1], {}, None, sent, NO_STATES, back.zero_grads(params[1]), 1)


PACKED = "pack_tokens(capacities=3)|int8(row)"
ERRORS = {  # codec of h, codec of the gradient: relative error of h, of the gradient
    ("fp16|zstd", "svd(0.9)|fp16"): (1e-3, 0.5),
    (PACKED, PACKED): (0.01, 0.01),
    ("from_step(2, fp16)", "from_step(2, fp16)"): (1e-3, 1e-3),
    ("error_feedback(int8(row))", "error_feedback(int4(row)|fp16)"): (0.02, 0.3),
}


@pytest.mark.parametrize("named", ERRORS, ids=" and ".join)
def test_gradients_are_those_of_what_was_received(named):
    """Payloads decoded by hand, put into plain JAX by hand, give the same gradients."""
    forward, backward = (codecs.from_string(each) for each in named)
    run = run_of(forward, backward)
    params = two_halves.init()
    spec = two_halves.spec_of(2)
    states = [forward.init(spec), backward.init(spec)]
    for step in range(2):  # what is fed back comes with the second
        _, micro_batches, keys = data(2)
        grads, *_ = run.step(params, micro_batches, keys(), step + 1)
        wants, errors = [], []
        for number, (batches, rngs) in enumerate(
            zip(micro_batches, keys(), strict=True)
        ):
            hidden, gradient = run.crossed[2 * step + number]
            got, states[0] = decoded(forward, hidden, states[0])
            error, states[1] = decoded(backward, gradient, states[1])
            want, losses = by_hand(params, batches, rngs, got, error)
            wants.append(want)
            errors.append(losses)
        two_halves.assert_close(grads, jax.tree.map(jnp.add, *wants))
        for kind, limit in enumerate(ERRORS[named]):
            assert max(pair[kind] for pair in errors) <= limit
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
    if "from_step(2" in named[0]:
        for way in range(2):
            assert [each[way].option for each in run.crossed] == [0, 0, 1, 1]


def decoded(each, selected, state):
    return selector.as_selector(each).decode(selected, state)


@jax.jit
def by_hand(params, batches, rngs, got, error):
    """Gradients of what was received, and how far that is from what was sent."""

    def back_loss(own, activations):
        return two_halves.back(own, got | {"h": activations}, batches[1], rngs[1])[0]

    back_grads, true_error = jax.grad(back_loss, (0, 1))(params[1], got["h"])
    hidden, pullback = jax.vjp(
        lambda own: two_halves.front(own, batches[0], rngs[0])["h"], params[0]
    )
    (front_grads,) = pullback(error["h"])
    real = batches[0]["mask"][..., None]  # pack_tokens leaves out the others
    return (front_grads, back_grads), (
        relative_error(got["h"] * real, hidden * real),
        relative_error(error["h"], true_error),
    )


def relative_error(got, want):
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


PROGRAMS = ("run_forward", "run_step", "run_backward")


def compiled(caplog, function):
    """Counts XLA's compilations of each of the halves' programs in `function`."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        function()
    lines = [each.message for each in caplog.records]
    return [
        sum(f"Compiling jit({each})" in line for line in lines) for each in PROGRAMS
    ]


def test_the_model_is_compiled_once_however_many_shapes_cross(caplog):
    pack = codecs.from_string("pack_tokens(capacities=5)|fp16")
    params, run = two_halves.init(), run_of(pack, pack)

    def steps():
        for seed in range(6):
            micro_batches = two_halves.pieces(two_halves.batch(seed), 2)
            run.step(params, micro_batches, two_halves.keys(2, seed))

    assert compiled(caplog, steps) == [1, 1, 1]
    assert compiled(caplog, steps) == [0, 0, 0]
    assert len({hidden.option for hidden, _ in run.crossed}) > 2


class Deep(nn.Module):
    """Layers behind layers: the second one's kernels are needed going back."""

    layer: type

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(self.layer(40)(x))
        return x


class Stack(nn.Module):
    """Layers in one `scan`."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.gelu(nn.Dense(40)(x)), None

        scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=3)
        return scan()(nn.Dense(40)(x), None)[0]


MODELS = {
    "recomputed": Deep(nn.remat(nn.Dense)),
    "jitted": Deep(nn.jit(nn.Dense)),
    "scanned": Stack(),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_not_kept_from_forward_to_backward(name):
    model = MODELS[name]
    x = np.random.RandomState(0).randn(3, L, 36).astype(np.float32)
    params = drawn.params(model, x)

    def fn(params, x, rng):
        return model.apply({"params": params}, x)

    front = cut.front(fn, IDENTITY, IDENTITY)
    rng = jax.random.key(0)
    sent, residuals, _, states = front.forward(params, x, rng, NO_STATES, 1)
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    weights |= {shape[1:] for shape in weights if len(shape) > 2}
    assert residuals.residuals.given
    assert not weights & {leaf.shape for leaf in residuals.residuals.kept}
    grads, *_ = front.backward(
        params, x, rng, residuals, sent, states, front.zero_grads(params)
    )
    want = jax.jit(jax.grad(lambda own: jnp.sum(fn(own, x, rng) ** 2) / 2))(params)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    two_halves.assert_close(grads, want, atol=1e-6 * max(1.0, size))


def test_a_cluster_of_several_devices_computes_the_same(caplog):
    params, [batch], keys = data()
    mesh = mesh_lib.make_mesh(jax.devices())
    rows, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    int8 = codecs.int8("row")
    front = cut.front(two_halves.front, IDENTITY, int8)
    back = cut.back(two_halves.back, IDENTITY, int8, sharding=rows)
    placed = jax.device_put(params, everywhere)
    both = [
        jax.tree.map(
            lambda leaf: jax.device_put(leaf, rows if leaf.ndim else everywhere), half
        )
        for half in batch
    ]

    def grads_of(params, batch):
        run = two_halves.Run(front, back, two_halves.spec_of(2))
        return run.step(params, [batch], keys())[0]

    got = grads_of(placed, both)
    # int8 of a sum in another order: one of its 127 steps, of gradients below 0.1.
    two_halves.assert_close(got, grads_of(params, batch), atol=1e-3)
    again = functools.partial(grads_of, placed, both)
    assert compiled(caplog, again) == [0, 0, 0]
