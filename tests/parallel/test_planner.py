"""The model of time, held against closed forms and the loops that it stands for."""

import dataclasses
import math

import jax
import pytest

from nebula_jax.communication.wire import frames
from nebula_jax.parallel import planner
from nebula_jax.parallel.planner import M3, Compute, Line, Lines

RATE, DELAY = 1e6, 0.05
LINE = Line(RATE, DELAY)
BOTH = Lines(LINE, LINE)
TOKEN = planner.TOKEN_BYTES / RATE
GENERATOR, DISCRIMINATOR = Compute(0.1, 0.2, 0.05), Compute(0.3, 0.4, 0.1)


def m3(**changes):
    run = M3((GENERATOR,), DISCRIMINATOR, (BOTH,), message_bytes=0.25e6)
    return dataclasses.replace(run, **changes)


def seconds(run, cores=None):
    return planner.time_of(run, cores).seconds


def test_clusters_that_take_turns_wait_for_each_other_and_the_line():
    turn = 0.35 + 0.25 + DELAY + 0.8 + TOKEN + DELAY
    assert seconds(m3(window=0)) == pytest.approx(turn)


def test_with_a_window_a_step_takes_as_long_as_its_slowest_part():
    assert seconds(m3(window=2)) == pytest.approx(0.8)
    assert seconds(m3(window=2, message_bytes=1.5e6)) == pytest.approx(1.5)
    slow = (GENERATOR, Compute(2.0, 1.0))
    assert seconds(m3(generators=slow, lines=(BOTH, BOTH))) == pytest.approx(3.0)


def test_a_window_covers_as_many_round_trips_as_it_has_steps():
    """From a generator's step to the token that lets it go on is one turn."""
    far = Line(0, 2.0)
    turn = 0.35 + 2.0 + 0.8 + 2.0
    run = m3(lines=(Lines(far, far),))
    for window in (0, 1, 2, 4):
        expected = max(0.8, turn / (window + 1))
        found = seconds(dataclasses.replace(run, window=window))
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("window", [4, 8, 13, 32])
def test_bursts_of_a_windows_steps_are_averaged_whole(window):
    """Where computing is short, `window` + 1 steps follow each other, once a turn."""
    far, part = Line(0, 0.3), Compute(0.01, 0.0)
    run = M3((part,), part, (Lines(far, far),), 1000, window=window)
    turn = 0.01 + 0.3 + 0.01 + 0.3
    assert seconds(run) == pytest.approx(turn / (window + 1), rel=1e-6)
    few = planner.time_of(run, steps=1).seconds
    assert few == pytest.approx(turn / (window + 1), rel=1e-6)


def test_fan_out_sends_each_micro_batch_while_the_next_is_made():
    run = m3(window=0, fan_out=4)
    made = 4 * 0.3  # the last one leaves then; each takes less on the line
    turn = made + 0.25 + DELAY + 4 * 0.7 + 0.1 + TOKEN + DELAY
    assert seconds(run) == pytest.approx(turn)


def test_what_computes_on_one_machine_shares_its_cores():
    generators = (GENERATOR,) * 3
    run = m3(generators=generators, lines=(BOTH,) * 3, window=2)
    total = 3 * 0.35 + 0.8
    assert seconds(run, cores=1) == pytest.approx(total, rel=0.01)
    # All four begin at a token; from 0.7 s on the discriminator has a core alone.
    assert seconds(run, cores=2) == pytest.approx(0.7 + (0.8 - 0.35))
    assert seconds(run, cores=8) == pytest.approx(seconds(run))


def test_a_steps_seconds_are_accounted_for():
    found = planner.time_of(m3(window=2))
    assert found.busy["generator 0"] == pytest.approx(0.35)
    assert found.busy["discriminator"] == pytest.approx(0.8)
    assert found.busy["line up 0"] == pytest.approx(0.25)
    assert found.busy["line down 0"] == pytest.approx(TOKEN)
    assert found.waits("generator 0") == pytest.approx(0.45)
    assert found.waits("discriminator") == pytest.approx(0)


def test_a_token_has_the_size_of_its_frame():
    message = frames.encode(frames.StepDone(1), 1, 1)
    assert len(b"".join(message)) == planner.TOKEN_BYTES


def test_no_device_is_needed(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *args: 1 / 0)
    assert math.isfinite(seconds(m3()))
