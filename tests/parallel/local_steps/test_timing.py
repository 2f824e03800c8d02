"""The time of a BERT run: rounds whose times come together."""

import json

from nebula_jax.parallel.local_steps import messages, timing


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
    again.resume(json.loads(json.dumps(timer.position)))
    assert again.latest() == [(20, 1500), (30, 3000)]
    anew.agree([head(*each) for each in again.latest()])
    assert anew.position["clock"] == timer.position["clock"]


def test_a_run_without_a_time_sends_none():
    """Its milliseconds do not fit a message for ever."""
    timer = timing.Timer(None)
    timer.resume({"milliseconds": 2**32, "clock": None})
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
        again.resume(position)
        assert again.is_over(step) is has_ended
    assert not timing.Timer(10.0).is_over(0)
    assert timing.Timer(None, steps=20).is_over(20)
    assert not timing.Timer(None, steps=20).is_over(19)


def test_a_run_is_over_once_a_cluster_has_requested_it():
    timer = timing.Timer(None, steps=20)
    timer.agree([head(5, 0), messages.Head(5, 0, 0, 0, is_stopping=1)])
    assert timer.is_over(5)
    assert not timer.is_last(5)


def test_progress_is_a_line_between_agreements():
    made = timing.Clock(total_ms=1000)
    assert made.progress(1) == made.progress(50) == 0  # nothing is known yet
    made = made.agreed(10, [180, 200])  # 20 ms a step
    assert [made.progress(step) for step in (11, 12, 31)] == [0.2, 0.22, 0.6]
    made = made.agreed(20, [700, 600])  # 50 ms a step
    assert [made.progress(step) for step in (21, 23, 27)] == [0.7, 0.8, 1.0]
    assert not made.is_over(25)
    assert made.is_over(26)
    assert made.progress(1000) == 1.0


def test_agreeing_twice_on_one_step_keeps_the_rate():
    made = timing.Clock(total_ms=1000).agreed(10, [100]).agreed(10, [120])
    assert (made.agreed_ms, made.per_step_ms) == (120, 10.0)


def test_something_is_left_for_the_end():
    assert timing.Timer(100.0).position["clock"]["total_ms"] == 97_000


def test_the_last_two_agreements_are_enough_to_follow():
    made = timing.Clock(total_ms=1000)
    assert made.latest == []
    assert made.agreed(10, [180]).latest == [(10, 180)]
    made = made.agreed(10, [180]).agreed(20, [300]).agreed(30, [700, 600])
    assert made.latest == [(20, 300), (30, 700)]
