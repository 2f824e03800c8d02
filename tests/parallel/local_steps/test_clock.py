"""The clock of a run that ends by wall time."""

from nebula_jax.parallel.local_steps import clock


def test_progress_is_a_line_between_agreements():
    made = clock.Clock(total_ms=1000)
    assert made.progress(1) == made.progress(50) == 0  # nothing is known yet
    made = made.agreed(10, [180, 200])  # 20 ms a step
    assert [made.progress(step) for step in (11, 12, 31)] == [0.2, 0.22, 0.6]
    made = made.agreed(20, [700, 600])  # 50 ms a step
    assert [made.progress(step) for step in (21, 23, 27)] == [0.7, 0.8, 1.0]
    assert not made.is_over(25)
    assert made.is_over(26)
    assert made.progress(1000) == 1.0


def test_agreeing_twice_on_one_step_keeps_the_rate():
    made = clock.Clock(total_ms=1000).agreed(10, [100]).agreed(10, [120])
    assert (made.agreed_ms, made.per_step_ms) == (120, 10.0)


def test_something_is_left_for_the_end():
    assert clock.of_seconds(100).total_ms == 97_000


def test_the_last_two_agreements_are_enough_to_follow():
    made = clock.Clock(total_ms=1000)
    assert made.latest == []
    assert made.agreed(10, [180]).latest == [(10, 180)]
    made = made.agreed(10, [180]).agreed(20, [300]).agreed(30, [700, 600])
    assert made.latest == [(20, 300), (30, 700)]
