"""Micro-batches over a real bridge, in one process, and against the whole model."""

import functools
import types
import weakref

import jax
import numpy as np
import optax
import pytest
import two_halves

from nebula_jax import trace as trace_lib
from nebula_jax.communication import codec, codecs, loopback, selector
from nebula_jax.communication.wire import frames
from nebula_jax.parallel import pipeline
from nebula_jax.training import cut

COUNT = 4  # micro-batches
PACKED = "pack_tokens(capacities=2)|int8(row)"
PLAIN = codecs.identity()
OPTIMIZER = optax.adam(1e-2)
STATEFUL = "error_feedback(int8(row))", "error_feedback(svd(0.5)|fp16)"
from_string = functools.cache(codecs.from_string)  # for `halves`


@functools.cache  # they compile once for all tests
def halves(forward, backward):
    return (
        cut.front(two_halves.front_with_loss, forward, backward, has_loss=True),
        cut.back(two_halves.back, forward, backward),
    )


def spec_of_h():
    return two_halves.spec_of(COUNT, two_halves.front_with_loss, has_loss=True)


def front_ends(link, spec, forward, backward):
    return (
        link.sender("hidden", spec, forward),
        link.receiver("gradient", spec, backward),
    )


def back_ends(link, spec, forward, backward):
    return (
        link.receiver("hidden", spec, forward),
        link.sender("gradient", spec, backward),
    )


@jax.jit
def update(params, state, grads):
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def trained(params, states, step_of, steps):
    """The parameters after some steps, and what else each step returned."""
    state, others = OPTIMIZER.init(params), []
    for step in range(1, steps + 1):
        grads, states, *other = step_of(params, states, step)
        others.append(other)
        params, state = update(params, state, grads)
    return params, others


def trained_in_process(forward, backward, steps):
    both = halves(forward, backward)
    carrier, spec = loopback.Loopback(), spec_of_h()
    hidden = (
        carrier.sender("hidden", spec, forward),
        carrier.receiver("hidden", spec, forward),
    )
    gradient = (
        carrier.sender("gradient", spec, backward),
        carrier.receiver("gradient", spec, backward),
    )

    def step_of(params, states, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        rngs = two_halves.rngs()
        return pipeline.in_process_step(
            both, params, pieces, rngs, step, hidden, gradient, states
        )

    states = tuple(half.init_states(spec) for half in both)
    return trained(two_halves.init(), states, step_of, steps)


def front_step_of(front, ends, ahead):
    def step_of(params, states, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        batches, rng = (piece[0] for piece in pieces), two_halves.rngs()[0]
        return pipeline.front_step(
            front, params, batches, rng, step, *ends, states, ahead=ahead
        )

    return step_of


def back_step_of(back, ends):
    def step_of(params, states, step):
        pieces = two_halves.pieces(two_halves.batch(step), COUNT)
        batches, rng = [piece[1] for piece in pieces], two_halves.rngs()[1]
        return pipeline.back_step(back, params, batches, rng, step, *ends, states)

    return step_of


@functools.cache
def trained_over_a_bridge(forward, backward, steps, line="", ahead=3):
    """Both halves' parameters, what else the steps returned, and a byte ledger."""
    front, back = halves(forward, backward)
    spec, params = spec_of_h(), two_halves.init()
    with two_halves.met(line) as (front_link, back_link):

        def run_front():
            with front_link:
                ends = front_ends(front_link, spec, forward, backward)
                front_link.wait_for_welcome(10.0)
                step_of = front_step_of(front, ends, ahead)
                return trained(params[0], front.init_states(spec), step_of, steps)

        def run_back():
            with back_link:
                ends = back_ends(back_link, spec, forward, backward)
                back_link.welcome(0)
                step_of = back_step_of(back, ends)
                result = trained(params[1], back.init_states(spec), step_of, steps)
            return result, back_link.ledger

        (backs, ledger), fronts = two_halves.both(run_front, run_back)
    return (fronts[0], backs[0]), (fronts[1], backs[1]), ledger


def test_five_steps_of_the_split_model_are_five_of_the_whole():
    params, (fronts, backs), _ = trained_over_a_bridge(PLAIN, PLAIN, steps=5)
    gradient = jax.jit(
        jax.value_and_grad(two_halves.whole_loss), static_argnames="front"
    )
    whole, state = two_halves.init(), OPTIMIZER.init(two_halves.init())
    for step in range(1, 6):
        batch, keys = two_halves.batch(step), two_halves.keys(COUNT, step)
        pieces = two_halves.pieces(batch, COUNT)
        loss, grads = gradient(whole, pieces, keys, front=two_halves.front_with_loss)
        own, metrics = fronts[step - 1][0], backs[step - 1][0]
        np.testing.assert_allclose(own + metrics["loss"], loss, rtol=1e-5)
        assert metrics["positions"] == batch[0]["mask"].sum()
        whole, state = update(whole, state, grads)
    two_halves.assert_close(params, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("forward", "backward", "line", "ahead"),
    [
        ("identity", "identity", "", 4),
        (f"{PACKED}|zstd", PACKED, "100mbit,2ms", 2),
        (*STATEFUL, "", 1),
    ],
)
def test_over_a_line_every_bit_is_as_in_one_process(forward, backward, line, ahead):
    forward, backward = map(from_string, (forward, backward))
    params, (fronts, backs), _ = trained_over_a_bridge(
        forward, backward, 3, line, ahead
    )
    want, others = trained_in_process(forward, backward, 3)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    for front, back, (own, metrics) in zip(fronts, backs, others, strict=True):
        np.testing.assert_array_equal(front[0], own)
        jax.tree.map(np.testing.assert_array_equal, back[0], metrics)


def test_the_ledger_counts_what_was_planned_and_nothing_else():
    forward, backward = map(from_string, STATEFUL)
    ledger = dict(trained_over_a_bridge(forward, backward, 3, "", 1)[2])
    spec = spec_of_h()
    kinds = {"received hidden": forward, "sent gradient": backward}
    end = frames.Tensor(0, 1, COUNT, [bytes(8)], frames.STEP_END)
    ends = 3 * sum(map(len, frames.encode(end, 1, 1)))
    ledger["received hidden"] = np.subtract(ledger["received hidden"], (3, ends))
    for kind, each in kinds.items():
        payload = jax.tree.leaves(codec.payload_spec(each, spec))
        buffers = [bytes(codec.nbytes(leaf)) for leaf in payload]
        frame = frames.encode(frames.Tensor(0, 1, 0, buffers), 1, 1)
        count = 3 * COUNT
        size = sum(memoryview(part).nbytes for part in frame)
        assert list(ledger[kind]) == [count, count * size]
        assert size - codec.nbytes(payload) < 50 + 8 * len(payload)
    tensors = {kind for kind in ledger if kind.split()[1].islower()}
    assert tensors == kinds.keys()


class Residuals:
    """Nothing but a thing that lives."""


class Half:
    """Writes down in which order a front is called, and what it still holds."""

    def __init__(self):
        self.calls, self._alive, self.most_alive = [], weakref.WeakSet(), 0

    def forward(self, params, batch, rng, states, step, received):
        assert received is None
        self.calls.append(f"F{batch}")
        residuals = Residuals()
        self._alive.add(residuals)
        self.most_alive = max(self.most_alive, len(self._alive))
        return selector.Selected(batch), residuals, 0.0, states

    def backward(self, params, batch, rng, kept, selected, states, grads, step):
        assert selected.payload == batch
        self.calls.append(f"B{batch}")
        return grads + 1, states, None

    def zero_grads(self, params):
        return 0


@pytest.mark.parametrize(
    ("ahead", "arrive", "calls"),
    [
        (1, False, "M0 F0 M1 B0 F1 M2 B1 F2 M3 B2 F3 end B3"),
        (2, False, "M0 F0 M1 F1 M2 B0 F2 M3 B1 F3 end B2 B3"),
        (3, False, "M0 F0 M1 F1 M2 F2 M3 B0 F3 end B1 B2 B3"),
        (9, False, "M0 F0 M1 F1 M2 F2 M3 F3 end B0 B1 B2 B3"),
        (9, True, "M0 F0 M1 B0 F1 M2 B1 F2 M3 B2 F3 end B3"),
    ],
)
def test_no_more_than_ahead_micro_batches_are_in_flight(ahead, arrive, calls):
    """Each is made (M) when it is due, goes forward (F) and back (B)."""
    half, sent = Half(), []

    def batches():
        for number in range(4):
            half.calls.append(f"M{number}")
            yield number

    hidden = types.SimpleNamespace(
        send_payload=lambda step, selected, *tag: sent.append(selected),
        end_step=lambda *about: half.calls.append("end"),
        trace=trace_lib.OFF,
    )
    gradient = types.SimpleNamespace(
        has_arrived=arrive, recv_payload=lambda *tag: sent.pop(0), trace=trace_lib.OFF
    )
    grads, states, _ = pipeline.front_step(
        half, None, batches(), None, 1, hidden, gradient, "states", ahead=ahead
    )
    assert states == "states"
    assert " ".join(half.calls) == calls
    assert grads == 4
    assert half.most_alive == (1 if arrive else min(ahead, 4))


def test_codecs_go_by_the_optimization_step_not_by_micro_batches():
    late = codecs.from_step(2, codecs.fp16())
    sizes = []
    both = halves(late, late)
    loop, spec = loopback.Loopback(), spec_of_h()
    hidden = loop.sender("hidden", spec, late), loop.receiver("hidden", spec, late)
    gradient = loop.sender("back", spec, late), loop.receiver("back", spec, late)
    states = tuple(half.init_states(spec) for half in both)
    for step in (1, 2):
        before = dict(loop.sent)
        _, states, *_ = pipeline.in_process_step(
            both,
            two_halves.init(),
            two_halves.pieces(two_halves.batch(step), COUNT),
            two_halves.rngs(),
            step,
            hidden,
            gradient,
            states,
        )
        sizes.append({way: loop.sent[way] - before.get(way, 0) for way in loop.sent})
    plain, half = (
        COUNT * codec.nbytes(codec.payload_spec(each, spec)) for each in late.codecs
    )
    assert half < plain
    assert sizes == [dict.fromkeys(("hidden", "back"), size) for size in (plain, half)]


def test_each_micro_batch_of_each_step_has_its_own_key():
    """The same ones however the run went before; None stays None."""
    keys = {
        tag: jax.random.key_data(pipeline.micro_batch_key(two_halves.rngs()[0], *tag))
        for tag in [(1, 0), (1, 1), (2, 0), (2, 1), (0, 1)]
    }
    assert len({tuple(np.asarray(key)) for key in keys.values()}) == len(keys)
    wants = two_halves.keys(2, step=2)
    for number, (want, _) in enumerate(wants):
        np.testing.assert_array_equal(keys[2, number], jax.random.key_data(want))
    assert pipeline.micro_batch_key(None, 1, 0) is None
