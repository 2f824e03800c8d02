"""The cost model against numbers computed by hand, and a run in virtual time."""

import dataclasses

import pytest

from nebula_jax.parallel import data_parallel
from nebula_jax.parallel.data_parallel import AllReduce, LocalSteps, Measured, Ring
from nebula_jax.parallel.planner import Compute, Line
from nebula_jax.training import local_steps

LINE = Line(1e6, 0.01)
RING = Ring(4, LINE)
COMPUTE = Compute(0.1, 0.2, 0.05)
ALONE = AllReduce((), 1e6)
THREE = AllReduce((RING,), 0.25e6, micro_batches=3)  # 1 MB of float32 gradients


def close(expected):
    return pytest.approx(expected, rel=1e-9)


def step(sync, compute=COMPUTE):
    return data_parallel.step_of(compute, sync)


def test_a_ring_sends_twice_all_parts_but_one():
    assert RING.sent(1e6) == 1.5e6  # 2 * 3 / 4
    assert RING.seconds(1e6) == close(1.5 + 6 * 0.01)  # 6 hops
    assert Ring(2, LINE).sent(1e6) == 1e6
    assert Ring(1, LINE).sent(1e6) == Ring(1, LINE).seconds(1e6) == 0.0
    assert Ring(32, Line(0, 0.001)).seconds(1e9) == close(62 * 0.001)


def test_a_batch_has_one_round_however_many_micro_batches():
    found = step(THREE)
    assert found.exposed == close(1.56)
    assert found.seconds == close(3 * 0.3 + 0.05 + 1.56)
    assert found.sent == 1.5e6
    assert found.exposed_share == close(1.56 / 2.51)


def test_a_round_in_every_micro_batch_costs_as_many():
    found = step(dataclasses.replace(THREE, in_every_micro_batch=True, constant=0.02))
    assert found.exposed == close(3 * (1.56 + 0.02))
    assert found.sent == 4.5e6


def test_a_backward_pass_hides_its_share_of_a_round():
    half = dataclasses.replace(THREE, overlap=0.5, constant=0.02)
    assert step(half).exposed == close(1.56 - 0.5 * 0.2 + 0.02)
    # The constant is never hidden, and nothing is gained beyond the round.
    long = Compute(1.0, 5.0)
    assert step(half, long).exposed == close(0.02)
    assert step(half, long).seconds == close(18.02)


def test_half_as_many_bytes_leave_the_delays():
    found = step(dataclasses.replace(THREE, bytes_per_value=2.0))
    assert found.exposed == close(0.75 + 0.06)
    assert found.sent == 0.75e6


def test_rings_follow_each_other_and_bytes_are_those_of_the_outermost():
    outer = Ring(2, Line(1e5, 0.5))
    found = step(dataclasses.replace(THREE, rings=(RING, outer)))
    assert found.exposed == close(1.56 + 10 + 2 * 0.5)
    assert found.sent == 1e6


@pytest.mark.parametrize("rings", [(), (Ring(1, LINE),)])
def test_whoever_is_alone_has_no_rounds(rings):
    found = step(AllReduce(rings, 1e6, 3, constant=0.5))
    assert found.seconds == close(0.95)
    assert found.exposed == found.sent == 0


def local(**changes):
    fields = {"inner_steps": 10, "delay": 2, "bits_per_value": 8.0, "constant": 0.5}
    settings = LocalSteps(ALONE, 3, Line(1e6, 0.05), (1e6, 3e6), **fields)
    return dataclasses.replace(settings, **changes)


SECOND = Compute(0.4, 0.6)


def test_what_of_a_fragment_has_not_crossed_in_time_is_waited_for():
    # Two messages of 1 MB take 2.05 s, of 3 MB 6.05 s; both have 2 steps of 1 s.
    found = step(local(), SECOND)
    assert found.exposed == close((0.05 + 4.05) / 10 + 2 * 0.5 / 10)
    assert found.seconds == close(1 + found.exposed)
    assert found.sent == close(2 * 4e6 / 10)


def test_a_hub_sends_what_all_others_lack():
    # R = 3: its own to two, and to each of them the other's.
    hub = local(has_hub=True)
    assert (local().messages, hub.messages) == (2, 4)
    assert hub.seconds(1e6) == close(4 + 2 * 0.05)
    assert (local(clusters=8).messages, local(clusters=8, has_hub=True).messages) == (
        *(7, 49),
    )
    # Between two it makes no difference.
    both = [local(clusters=2, has_hub=each) for each in (False, True)]
    assert step(both[0], SECOND) == step(both[1], SECOND)


def test_every_step_in_whole_floats_costs_what_an_all_reduce_of_two_does():
    line = Line(1e6, 0.0)
    often = LocalSteps(ALONE, 2, line, (1e6,), inner_steps=1)
    both = AllReduce((Ring(2, line),), 1e6)
    assert step(often) == step(both)


def test_inner_steps_have_the_all_reduce_of_their_cluster():
    often = local(inner=THREE, clusters=1)
    assert step(often) == step(THREE)
    waits = step(local(inner=THREE, constant=0.0))
    window = 2 * 2.51
    assert waits.exposed == close(1.56 + (6.05 - window) / 10)


def virtual(settings, sync, rounds=30):
    """Runs the schedule of `training.local_steps` in virtual time: seconds a step."""
    now, line_free, marks = 0.0, 0.0, []
    arrivals = {}
    for number in range(1, settings.inner_steps * rounds + 1):
        now += SECOND.micro_batch
        fragment = settings.sent_after(number)
        if fragment is not None:
            count = sync.messages * sync.fragments[fragment] * sync.bits_per_value / 8
            line_free = max(now, line_free) + sync.line.seconds(count)
            arrivals[number] = line_free + sync.line.delay_seconds
        if settings.applied_after(number) is not None:
            now = max(now, arrivals.pop(number - settings.delay)) + sync.constant
        marks.append(now)
    first, last = marks[settings.inner_steps - 1], marks[-1]
    return (last - first) / (len(marks) - settings.inner_steps)


@pytest.mark.parametrize("rate", [0.1e6, 1e6, 10e6])
@pytest.mark.parametrize(
    ("inner_steps", "parts", "delay"),
    [(10, 1, 0), (10, 1, 9), (12, 2, 3), (40, 4, 5), (1, 1, 0)],
)
def test_the_cost_is_that_of_the_schedule_itself(inner_steps, parts, delay, rate):
    settings = local_steps.Config(inner_steps, parts, delay)
    sync = local(
        fragments=(2e6, 1e6, 1e6, 1.5e6)[:parts],
        line=Line(rate, 0.05),
        inner_steps=inner_steps,
        delay=delay,
    )
    assert step(sync, SECOND).seconds == pytest.approx(
        virtual(settings, sync), rel=1e-6
    )


def test_phases_add_up():
    found = data_parallel.total([(2, step(THREE)), (3, step(ALONE))])
    assert found.seconds == close(2 * 2.51 + 3 * 0.35)
    assert found.exposed == close(2 * 1.56)
    assert found.sent == 3e6


FITTED = data_parallel.compute_of(0.37, update=0.05), 0.12
FEW = dataclasses.replace(THREE, micro_batches=2)
PAIRS = {
    "accumulation": (dataclasses.replace(THREE, micro_batches=16), FEW),
    "one node and four": (AllReduce((Ring(1, LINE),), 0.25e6, 16), FEW),
    "overlapped": (
        dataclasses.replace(THREE, micro_batches=16, overlap=0.9),
        dataclasses.replace(FEW, values=0.01e6, overlap=0.9),  # hidden wholly
    ),
    "how often": (dataclasses.replace(THREE, in_every_micro_batch=True), THREE),
    "local steps": (local(delay=0, inner_steps=4), local(delay=0, inner_steps=32)),
    "local steps, delayed": (local(delay=1, inner_steps=4), local(inner_steps=32)),
}


def measured(sync):
    """A step of a system of which `data_parallel` has all but two numbers."""
    compute, constant = FITTED
    real = dataclasses.replace(sync, constant=constant)
    return Measured(sync, data_parallel.step_of(compute, real).seconds)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_measured_steps_give_both_times_and_predict_the_others(pair):
    found = data_parallel.fit([measured(each) for each in pair], update=0.05)
    assert found.constant == pytest.approx(0.12, rel=1e-6)
    assert found.compute.micro_batch == pytest.approx(0.37, rel=1e-6)
    for syncs in PAIRS.values():
        for sync in syncs:
            predicted = data_parallel.predict(found, sync).seconds
            assert predicted == pytest.approx(measured(sync).seconds, rel=1e-6)


def test_a_fit_by_hand():
    # 10 t + c = 4.3 and 2 t + 1.56 + c = 2.66 beside an update of 0.1, without a line
    # in the first: t = 0.4, so c = 0.2; the first is alone and has none.
    alone = AllReduce((), 0.25e6, 10)
    found = data_parallel.fit([Measured(alone, 4.1), Measured(FEW, 2.66)], 0.1)
    assert found.compute == Compute(*(close(each) for each in (0.4 / 3, 0.8 / 3, 0.1)))
    assert found.constant == close(0.2)


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ([Measured(THREE, 3.0)], "two measured configurations, not 1"),
        ([Measured(THREE, 3.0), Measured(THREE, 3.0)], "no time of a micro-batch"),
        # Sixteen micro-batches in less than two take.
        ([Measured(PAIRS["accumulation"][0], 1.0), Measured(FEW, 9.0)], "no time of"),
        ([Measured(ALONE, 3.0), Measured(ALONE, 3.0)], "no time of a micro-batch"),
    ],
)
def test_what_determines_nothing_is_refused(several, message):
    with pytest.raises(ValueError, match=message):
        data_parallel.fit(several)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"overlap is 1\.5"):
        AllReduce((), 1e6, overlap=1.5)
    with pytest.raises(ValueError, match="micro_batches is 0"):
        AllReduce((), 1e6, 0)
    with pytest.raises(ValueError, match="below the 5 steps between two fragments"):
        local(delay=5)
