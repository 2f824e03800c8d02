"""The time of a step, held against turns that are added up by hand."""

import dataclasses

import pytest

from nebula_jax.communication.wan import Line, Lines
from nebula_jax.communication.wire import frames
from nebula_jax.parallel import planner
from nebula_jax.parallel.planner import M3

RATE, DELAY = 1e6, 0.05  # bytes a second, seconds
LINE = Line(8 * RATE, DELAY)
TOKEN = planner.TOKEN_BYTES / RATE
RUN = M3(0.35, 0.8, Lines(LINE, LINE), message_bytes=0.25e6)


def seconds(**changes):
    return planner.seconds(dataclasses.replace(RUN, **changes))


def test_clusters_that_take_turns_wait_for_each_other_and_the_line():
    turn = 0.35 + 0.25 + DELAY + 0.8 + TOKEN + DELAY
    assert seconds(window=0) == pytest.approx(turn)


def test_with_a_window_a_step_takes_as_long_as_its_slowest_part():
    assert seconds() == pytest.approx(0.8)
    assert seconds(message_bytes=1.5e6) == pytest.approx(1.5)
    assert seconds(generator=3.0) == pytest.approx(3.0)


def test_a_window_covers_as_many_round_trips_as_it_has_steps():
    """From a generator's step to the token that lets it go on is one turn."""
    far = Line(0, 2.0)
    turn = 0.35 + 2.0 + 0.8 + 2.0
    for window in (0, 1, 2, 4):
        expected = max(0.8, turn / (window + 1))
        found = seconds(lines=Lines(far, far), window=window)
        assert found == pytest.approx(expected, rel=1e-6)


def test_fan_out_sends_each_micro_batch_while_the_next_is_made():
    made = 4 * 0.35  # the last one leaves then; each takes less on the line
    turn = made + 0.25 + DELAY + 4 * 0.8 + TOKEN + DELAY
    assert seconds(window=0, fan_out=4) == pytest.approx(turn)
    filled = 0.35 + 4 * 1.5  # the line is what takes longest
    turn = filled + DELAY + 4 * 0.8 + TOKEN + DELAY
    found = seconds(window=0, fan_out=4, message_bytes=1.5e6)
    assert found == pytest.approx(turn)


def test_a_steps_seconds_are_accounted_for():
    found = planner.busy(dataclasses.replace(RUN, fan_out=2))
    assert found == {
        "generators": pytest.approx(0.7),
        "discriminator": pytest.approx(1.6),
        "line up": pytest.approx(0.5),
        "line down": pytest.approx(TOKEN),
    }


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, "discriminator"),
        ({"message_bytes": 2e6}, "line up"),
        ({"generator": 4.0}, "generators"),
        ({"lines": Lines(Line(0, 9.0), Line(0, 9.0))}, "round trips"),
    ],
)
def test_the_bottleneck_is_what_would_gain_most(changes, bottleneck):
    found = planner.savings(dataclasses.replace(RUN, **changes))
    assert next(iter(found)) == bottleneck
    assert 0.2 < found[bottleneck] <= 0.5 + 1e-9


def test_fan_out_is_the_ratio_of_both_sides_and_at_most_the_replicas():
    assert planner.fan_out(RUN, replicas=8) == (8, pytest.approx(0.8 * 8 / 0.35))
    slow = dataclasses.replace(RUN, generator=2.0)
    assert planner.fan_out(slow, replicas=8) == (3, pytest.approx(0.8 * 8 / 2))
    assert planner.fan_out(slow, replicas=1) == (1, pytest.approx(0.4))


def test_a_token_has_the_size_of_its_frame():
    message = frames.encode(frames.StepDone(1), 1, 1)
    assert len(b"".join(message)) == planner.TOKEN_BYTES
