"""The time of a BERT run: rounds whose times come together."""

import json

from experiments.bert import timing
from nebula_jax.parallel.local_steps import messages


def head(step, milliseconds):
    return messages.Head(step, 0, 0, 0, milliseconds)


def test_rounds_that_are_applied_at_once_count_one_after_the_other():
    """As in a cluster that was late for the first: its clock is that of the others."""
    heads = [[head(10, 900), head(10, 1000)], [head(20, 1500)], [head(30, 3000)]]
    one, two = timing.Timer(60.0), timing.Timer(60.0)
    for each in heads:
        one.agree(each)
    two.agree([*heads[0], *heads[1], *heads[2]])
    clock = one.position["clock"]
    assert two.position["clock"] == clock
    assert (clock["agreed_step"], clock["per_step_ms"]) == (30, 150.0)
    two.agree([])
    assert two.position["clock"] == clock


def test_two_rounds_are_enough_to_follow_the_clock():
    one, two = timing.Timer(60.0), timing.Timer(60.0)
    for each in (head(10, 1000), head(20, 1500), head(30, 3000)):
        one.agree([each])
    two.agree([head(20, 1500), head(30, 3000)])
    assert two.position["clock"] == one.position["clock"]


def test_the_times_of_the_latest_rounds_are_kept_in_a_checkpoint():
    """A hub sends them to a cluster that comes anew, also after its own restart."""
    assert timing.Timer(None).latest() == timing.Timer(60.0).latest() == []
    timer = timing.Timer(60.0)
    timer.agree([head(10, 1000)])
    assert timer.latest() == [(10, 1000)]
    timer.agree([head(20, 1400), head(20, 1500), head(30, 3000)])
    again, anew = timing.Timer(60.0), timing.Timer(60.0)
    again.go_on(json.loads(json.dumps(timer.position)))
    assert again.latest() == [(20, 1500), (30, 3000)]
    anew.agree([head(*each) for each in again.latest()])
    assert anew.position["clock"] == timer.position["clock"]


def test_a_checkpoint_without_the_round_before_the_last_goes_on():
    timer = timing.Timer(60.0)
    clock = {"total_ms": 5, "agreed_ms": 3, "agreed_step": 9, "per_step_ms": 0.3}
    timer.go_on({"milliseconds": 3, "clock": clock})
    assert timer.latest() == [(9, 3)]


def test_a_run_without_a_time_sends_none():
    """Its milliseconds do not fit a message for ever."""
    timer = timing.Timer(None)
    timer.go_on({"milliseconds": 2**32, "clock": None})
    assert timer.now(True) == (0, True)
    assert timer.position["milliseconds"] >= 2**32


def test_a_run_that_was_over_when_it_saved_has_ended():
    timer = timing.Timer(10.0)
    timer.agree([head(10, 5000)])
    under_way = timer.position
    timer.agree([head(20, 9700)])
    over = timer.position
    for position, step, has_ended in ((under_way, 10, False), (over, 20, True)):
        again = timing.Timer(10.0)
        again.go_on(position)
        assert again.has_ended(step, 1) is has_ended
    assert not timing.Timer(10.0).has_ended(0, 1)
    assert timing.Timer(None).has_ended(20, 20)
    assert not timing.Timer(None).has_ended(19, 20)
