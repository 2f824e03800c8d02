"""Micro-batches over a real bridge, in one process, and against the whole model."""

import types
import weakref

import jax
import numpy as np
import optax
import pytest
import two_halves

from nebula_jax.communication import codec, codecs, loopback
from nebula_jax.communication.wire import frames, session
from nebula_jax.parallel import pipeline
from nebula_jax.training import cut

pytestmark = pytest.mark.reuses_keys

COUNT = 4  # micro-batches
PACKED = "pack_tokens(capacities=3)|int8(row)"
OPTIMIZER = optax.adam(1e-2)


def halves(forward, backward):
    return (
        cut.front(two_halves.front_with_loss, forward, backward, has_loss=True),
        cut.back(two_halves.back, forward, backward),
    )


def spec_of(near):
    piece = two_halves.pieces(two_halves.batch(), COUNT)[0]
    return near.spec(two_halves.init()[0], piece[0], two_halves.rngs()[0])


def near_ends(link, spec, forward, backward):
    return (
        link.sender("hidden", spec, forward),
        link.receiver("gradient", spec, backward),
    )


def far_ends(link, spec, forward, backward):
    return (
        link.receiver("hidden", spec, forward),
        link.sender("gradient", spec, backward),
    )


@jax.jit
def update(params, state, grads):
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def trained(params, step_of, steps):
    """The parameters after some steps, and what else each step returned."""
    state, others = OPTIMIZER.init(params), []
    for step in range(1, steps + 1):
        grads, *other = step_of(params, step)
        others.append(other)
        params, state = update(params, state, grads)
    return params, others


def trained_in_a_loop(forward, backward, steps):
    near, far = halves(forward, backward)
    carrier, spec = loopback.Loopback(), spec_of(near)
    hidden = (
        carrier.sender("hidden", spec, forward),
        carrier.receiver("hidden", spec, forward),
    )
    gradient = (
        carrier.sender("gradient", spec, backward),
        carrier.receiver("gradient", spec, backward),
    )

    def step_of(params, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        rngs = two_halves.rngs(step)
        return pipeline.looped_step(
            *((near, far), params, pieces, rngs, step, hidden, gradient)
        )

    return trained(two_halves.init(), step_of, steps)


def near_step_of(near, ends, ahead=3):
    def step_of(params, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        batches, rng = (piece[0] for piece in pieces), two_halves.rngs(step)[0]
        return pipeline.front_step(near, params, batches, rng, step, *ends, ahead=ahead)

    return step_of


def far_step_of(far, ends, offset=0):
    def step_of(params, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        batches, rng = [piece[1] for piece in pieces], two_halves.rngs(step)[1]
        return pipeline.back_step(far, params, batches, rng, step + offset, *ends)

    return step_of


def trained_over_a_bridge(forward, backward, steps, line="", ahead=3):
    """Both halves' parameters, what else the steps returned, and a byte ledger."""
    near, far = halves(forward, backward)
    spec, params = spec_of(near), two_halves.init()
    with two_halves.met(line) as (there, here):

        def run_near():
            with there:
                ends = near_ends(there, spec, forward, backward)
                there.wait_for_welcome(10.0)
                return trained(params[0], near_step_of(near, ends, ahead), steps)

        def run_far():
            with here:
                ends = far_ends(here, spec, forward, backward)
                here.welcome(0)
                result = trained(params[1], far_step_of(far, ends), steps)
            return result, here.ledger

        (fars, ledger), nears = two_halves.both(run_near, run_far)
    return (nears[0], fars[0]), (nears[1], fars[1]), ledger


def test_five_steps_of_the_split_model_are_five_of_the_whole():
    identity = codec.identity()
    params, (nears, fars), _ = trained_over_a_bridge(identity, identity, steps=5)
    gradient = jax.jit(
        jax.value_and_grad(two_halves.whole_loss), static_argnames="near"
    )
    whole, state = two_halves.init(), OPTIMIZER.init(two_halves.init())
    for step in range(1, 6):
        batch, rngs = two_halves.batch(step), two_halves.rngs(step)
        loss, grads = gradient(whole, batch, rngs, near=two_halves.front_with_loss)
        own, metrics = nears[step - 1][0], fars[step - 1][0]
        np.testing.assert_allclose(own + metrics["loss"], loss, rtol=1e-5)
        assert metrics["positions"] == batch[0]["mask"].sum()
        whole, state = update(whole, state, grads)
    two_halves.assert_close(params, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("forward", "backward", "line", "ahead"),
    [
        ("identity", "identity", "", 4),
        (f"{PACKED}|zstd", PACKED, "100mbit,2ms", 2),
        ("delta(int8(row), 8)", "error_feedback(top_k(0.5)|fp16)", "", 1),
    ],
)
def test_over_a_line_every_bit_is_as_in_one_process(forward, backward, line, ahead):
    forward, backward = map(codecs.from_string, (forward, backward))
    params, (nears, fars), _ = trained_over_a_bridge(forward, backward, 3, line, ahead)
    want, others = trained_in_a_loop(forward, backward, 3)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    for near, far, (own, metrics) in zip(nears, fars, others, strict=True):
        np.testing.assert_array_equal(near[0], own)
        jax.tree.map(np.testing.assert_array_equal, far[0], metrics)


def test_the_ledger_counts_what_was_planned_and_nothing_else():
    forward, backward = map(codecs.from_string, ("fp16", "int8(64)"))
    ledger = trained_over_a_bridge(forward, backward, steps=3)[2]
    spec = spec_of(halves(forward, backward)[0])
    for direction, each in (("received", forward), ("sent", backward)):
        payload = jax.tree.leaves(codec.payload_spec(each, spec))
        buffers = [bytes(codec.nbytes(leaf)) for leaf in payload]
        frame = frames.encode(frames.Tensor(0, 1, 0, buffers), 1, 1)
        count = 3 * COUNT
        size = sum(memoryview(part).nbytes for part in frame)
        assert ledger[f"{direction} Tensor[0]"] == [count, count * size]
        assert size - codec.nbytes(payload) < 50 + 8 * len(payload)
    tensors = {kind for kind in ledger if "Tensor" in kind}
    assert tensors == {"received Tensor[0]", "sent Tensor[0]"}


def test_halves_that_are_not_at_the_same_step_stop_with_an_error():
    identity = codec.identity()
    near, far = halves(identity, identity)
    spec, params = spec_of(near), two_halves.init()
    words = "near sent hidden for step 1, micro-batch 0; expected step 2, micro-batch 0"
    with two_halves.met() as (there, here):

        def run_near():
            with there:
                ends = near_ends(there, spec, identity, identity)
                there.wait_for_welcome(10.0)
                near_step_of(near, ends)(params[0], 1)

        def run_far():
            with here:
                ends = far_ends(here, spec, identity, identity)
                here.welcome(0)
                far_step_of(far, ends, offset=1)(params[1], 1)

        two_halves.both(
            lambda: fails(run_near, session.PeerAborted, words),
            lambda: fails(run_far, session.RemoteProtocolError, words),
        )


def fails(function, kind, words):
    with pytest.raises(kind, match=words):
        function()


class Residuals:
    """Nothing but a thing that lives."""


class Half:
    """Writes down in which order a front is called, and what it still holds."""

    def __init__(self):
        self.calls, self._alive, self.most_alive = [], weakref.WeakSet(), 0

    def forward(self, params, batch, rng, state, step):
        self.calls.append(f"F{batch}")
        residuals = Residuals()
        self._alive.add(residuals)
        self.most_alive = max(self.most_alive, len(self._alive))
        return cut.Sent(batch, 0, state), residuals, 0.0

    def backward(self, params, batch, rng, residuals, payload, option, state, grads):
        assert payload == batch
        self.calls.append(f"B{batch}")
        return grads + 1, state

    def no_gradients(self, params):
        return 0


@pytest.mark.parametrize(
    ("ahead", "arrive", "calls"),
    [
        (1, False, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (2, False, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (3, False, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (9, False, "F0 F1 F2 F3 B0 B1 B2 B3"),
        (9, True, "F0 B0 F1 B1 F2 B2 F3 B3"),
    ],
)
def test_no_more_than_ahead_micro_batches_are_under_way(ahead, arrive, calls):
    half, sent = Half(), []
    hidden = types.SimpleNamespace(
        state=(), send_payload=lambda step, payload, *tag: sent.append(payload)
    )
    gradient = types.SimpleNamespace(
        state=(), has_arrived=arrive, recv_payload=lambda *tag: (sent.pop(0), 0)
    )
    grads, _ = pipeline.front_step(
        half, None, range(4), None, 1, hidden, gradient, ahead=ahead
    )
    assert " ".join(half.calls) == calls
    assert grads == 4
    assert half.most_alive == (1 if arrive else min(ahead, 4))


def test_codecs_go_by_the_optimisation_step_not_by_micro_batches():
    late = codecs.from_step(2, codecs.fp16())
    sizes = []
    near, far = halves(late, late)
    loop, spec = loopback.Loopback(), spec_of(near)
    hidden = loop.sender("hidden", spec, late), loop.receiver("hidden", spec, late)
    gradient = loop.sender("back", spec, late), loop.receiver("back", spec, late)
    for step in (1, 2):
        before = dict(loop.sent)
        pipeline.looped_step(
            *((near, far), two_halves.init()),
            two_halves.pieces(two_halves.batch(step), COUNT),
            *(two_halves.rngs(step), step, hidden, gradient),
        )
        sizes.append({way: loop.sent[way] - before.get(way, 0) for way in loop.sent})
    plain, half = (
        COUNT * codec.nbytes(codec.payload_spec(each, spec)) for each in late.options
    )
    assert half < plain
    assert sizes == [dict.fromkeys(("hidden", "back"), size) for size in (plain, half)]


def test_none_ahead_is_refused():
    with pytest.raises(ValueError, match="ahead must be at least 1, not 0"):
        pipeline.front_step(Half(), None, [], None, 1, None, None, ahead=0)


def test_a_micro_batch_is_made_when_it_is_due():
    log = []

    class End:
        state, has_arrived = (), False

        def send_payload(self, *message):
            log.append("sent")

        def recv_payload(self, *tag):
            log.append("gradient")
            return (), 0

    def batches():
        for number in range(3):
            log.append("made")
            yield number

    half = cut.Front(
        forward=lambda *given: (cut.Sent((), 0, ()), None, 0.0),
        backward=lambda *given: ({}, ()),
        spec=None,
        no_gradients=lambda params: {},
    )
    pipeline.front_step(half, {}, batches(), None, 1, End(), End(), ahead=1)
    assert log == [
        *("made", "sent", "made", "gradient", "sent"),
        *("made", "gradient", "sent", "gradient"),
    ]
