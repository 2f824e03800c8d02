"""The rule that chooses codecs, alone and on lines that a formula stands for."""

import dataclasses

import numpy as np
import pytest

from nebula_jax.parallel import codec_control
from nebula_jax.parallel.codec_control import Levels, Probe

EVERY = 5
SIZES = (1000, 500, 250, 120, 60)
POLICY = codec_control.Policy(EVERY, 0.98, (SIZES, SIZES))
WAITS, COMPUTES = 2.0, 1.0


def probes(*figures):
    """Probes of (levels, forward, backward, line_bound), in turn."""
    return [
        Probe(EVERY * (number + 1), Levels(*levels), *rest)
        for number, (levels, *rest) in enumerate(figures)
    ]


GOOD, ROOM = (0.99, 0.99, WAITS), (0.99, 0.99, COMPUTES)
BAD, BAD_BACK = (0.9, 0.9, WAITS), (0.99, 0.9, WAITS)
# A level that was left, and probes until it is tried again.
LEFT = [((0, 0), *GOOD)] * 4 + [((1, 1), *BAD)] * 2 + [((0, 1), *BAD)] * 2
DECIDED = [
    ([], (0, 0)),
    # One level harder after four good probes, and only if the line is waited for.
    ([((0, 0), *GOOD)] * 3, (0, 0)),
    ([((0, 0), *GOOD)] * 4, (1, 1)),
    ([((0, 0), *GOOD)] * 3 + [((0, 0), 0.97, 0.99, WAITS)], (0, 0)),
    ([((0, 0), *GOOD)] * 3 + [((0, 0), 0.99, 0.97, WAITS)], (0, 0)),
    ([((0, 0), *GOOD)] * 3 + [((0, 0), *ROOM)], (0, 0)),
    # What crosses less is left as it is.
    ([((2, 1), *GOOD)] * 4, (2, 2)),
    ([((1, 3), *GOOD)] * 4, (2, 3)),
    ([((4, 4), *GOOD)] * 9, (4, 4)),
    # One level gentler after two bad probes, in the direction that is to blame.
    ([((2, 2), *BAD)], (2, 2)),
    ([((2, 2), *BAD)] * 2, (1, 2)),
    ([((2, 2), *BAD_BACK)] * 2, (2, 1)),
    ([((0, 2), *BAD)] * 2, (0, 1)),
    ([((2, 2), *BAD), ((2, 2), *GOOD)], (2, 2)),
    ([((3, 3), *BAD), ((2, 3), *BAD)], (2, 3)),  # other levels do not count
    # One level gentler where bytes are to be had.
    ([((2, 2), *ROOM)] * 3, (2, 2)),
    ([((2, 2), *ROOM)] * 4, (1, 1)),
    ([((0, 0), *ROOM)] * 9, (0, 0)),
    # The other direction is gentler where one has no gentler level.
    ([((2, 0), *BAD_BACK)] * 2, (1, 0)),
    ([((2, 0), *ROOM)] * 4, (1, 0)),
    ([((0, 2), *ROOM)] * 4, (0, 1)),
    ([((0, 0), *BAD_BACK)] * 2, (0, 0)),
    # Levels that were left are tried again later and later.
    ([*LEFT, *[((0, 0), *GOOD)] * 7], (0, 0)),
    ([*LEFT, *[((0, 0), *GOOD)] * 8], (1, 1)),
]


@pytest.mark.parametrize(("figures", "levels"), DECIDED)
def test_what_is_decided_after_these_probes(figures, levels):
    history = codec_control.History(probes(*figures))
    assert codec_control.decide(POLICY, history) == Levels(*levels)


def run(line, cosines, steps=2000, compute=1.0, every=EVERY):
    """A run on a line of so many bytes a second; returns its log and step times.

    line: step -> bytes a second.
    cosines: of each level.
    """
    policy = dataclasses.replace(POLICY, every=every)
    log, times = codec_control.DecisionLog(policy), []
    for step in range(1, steps + 1):
        levels = log.levels(step)
        wire = max(SIZES[level] for level in levels) / line(step)
        times.append(max(compute, wire))
        if log.is_probed(step):
            forward = cosines[levels.forward]
            both = forward * cosines[levels.backward]
            row = Probe(step, levels, forward, both, wire / compute).row
            log.write(codec_control.of_row(row))
    return log, np.array(times)


COSINES = (1.0, 0.9999, 0.995, 0.96, 0.8)


@pytest.mark.parametrize(
    ("rate", "wanted"), [(10.0, 2), (100.0, 2), (300.0, 2), (600.0, 1), (2000.0, 0)]
)
def test_it_settles_on_the_least_lossy_that_the_line_takes_or_the_hardest_of_quality(
    rate, wanted
):
    log, times = run(lambda step: rate, COSINES)
    best = min(max(1.0, SIZES[level] / rate) for level in (0, 1, 2))
    assert times[-500:].mean() <= 1.05 * best
    last = [max(log.levels(step)) for step in range(1500, 2000)]
    assert np.mean(np.array(last) == wanted) > 0.9


def test_it_follows_a_line_that_changes():
    log, times = run(lambda step: 2000.0 if step < 1000 else 250.0, COSINES)
    assert log.levels(999) == Levels(0, 0)
    assert times[-500:].mean() <= 1.05
    assert max(log.levels(2000)) == 2


def test_a_level_that_costs_quality_is_not_used_for_long():
    log, _ = run(lambda step: 10.0, COSINES, steps=4000)
    used = np.array([max(log.levels(step)) for step in range(1, 4001)])
    assert np.mean(used > 2) < 0.05
    assert used[: 4 * POLICY.soon].max() == 0


def test_a_front_that_loses_what_the_back_does_not_gets_gentler_codecs_forward():
    """The front's gradients suffer from codecs that leave the back's as they are."""
    backs, fronts = (1.0, 0.9999, 0.99, 0.96, 0.8), (1.0, 0.999, 0.97, 0.9, 0.7)
    log, bad, steps = codec_control.DecisionLog(POLICY), 0, 6000
    for step in range(1, steps + 1):
        levels = log.levels(step)
        bad += fronts[levels.forward] < POLICY.quality
        if log.is_probed(step):
            rate = 50.0 if step < steps // 2 else 1e6
            wire = max(SIZES[level] for level in levels) / rate
            cosines = backs[levels.forward], fronts[levels.forward]
            log.write(Probe(step, levels, *cosines, wire))
    assert bad < 0.05 * steps
    assert log.levels(steps) == Levels(0, 0)  # the line got faster


def test_probes_come_sooner_while_new_rungs_are_sought():
    every, soon = 80, 10
    policy = dataclasses.replace(POLICY, every=every)

    def after(*figures):
        history = codec_control.History(probes(*figures))
        found = codec_control.next_probe(policy, history)
        return found - EVERY * len(figures)

    good, bad, room = GOOD, BAD, ROOM
    assert after() == soon
    assert after(((0, 0), *good)) == soon  # asks for the next
    assert after(((0, 0), *room)) == every  # fast enough, and the least lossy
    assert after(*[((4, 4), *good)] * 2) == every  # nothing comes behind
    assert after(((2, 2), *bad)) == soon
    assert after(((0, 0), *bad)) == every  # nothing is gentler
    assert after(((2, 2), *room)) == soon  # others may do
    assert after(*LEFT, ((0, 0), *good)) == every  # the next was left


def test_a_settled_run_is_probed_every_so_many_steps_and_no_more():
    log, _ = run(lambda step: 300.0, (1.0, 0.9999, 0.995, 0.9, 0.8), every=40)
    steps = np.array([probe.step for probe in log.probes])
    assert max(log.levels(100)) == 2  # 2 levels of 4 probes, each after 5 steps
    assert np.mean(np.diff(steps[steps > 500]) == 40) > 0.8


def test_a_log_that_was_saved_goes_on_as_it_was():
    log = codec_control.DecisionLog(POLICY)
    for step in range(1, 201):
        if log.is_probed(step):
            levels = log.levels(step)
            cosine = COSINES[max(levels)]
            row = Probe(step, levels, cosine, cosine, 2.0).row
            log.write(codec_control.of_row(row))
    other = codec_control.DecisionLog(POLICY)
    other.resume(log.rows)
    assert other.probes == log.probes
    assert np.shape(log.rows) == (len(log.probes), 6)
    half = codec_control.DecisionLog(POLICY)
    half.resume(log.rows[:20])
    assert half.probes == log.probes[:20]
    last = half.probes[-1].step
    for step in range(1, last + POLICY.soon + 1):
        assert half.levels(step) == log.levels(step)
    following = [step for step in range(last, 201) if half.is_probed(step)]
    assert following == [log.probes[20].step]
    assert log.following == log.levels(log.probes[-1].step + 1)
    assert {max(probe.levels) for probe in log.probes} >= {0, 1, 2}


def test_what_cannot_follow_is_refused():
    log = codec_control.DecisionLog(POLICY)
    for probe, problem in (
        (Probe(10, Levels(), 1, 1, 1), "a probe of step 10 where one of step 2"),
        (Probe(2, Levels(1, 0), 1, 1, 1), "where the decision log has"),
        (Probe(2, Levels(), 1.5, 1, 1), "has cosines"),
        (Probe(2, Levels(), np.nan, 1, 1), "has cosines"),
        (Probe(2, Levels(), 1, 1, np.inf), "a ratio of times of inf"),
        (Probe(2, Levels(), 1, 1, -1), "a ratio of times of -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            log.write(probe)


def test_a_row_without_whole_numbers_is_refused():
    for row in ([3, 0.5, 0, 1, 1, 1], [np.nan, 0, 0, 1, 1, 1], [3, 0, np.inf, 1, 1, 1]):
        with pytest.raises(ValueError, match=r"a probe of step \S+ with levels"):
            codec_control.of_row(np.asarray(row, np.float32))


def test_a_run_that_goes_on_takes_what_was_kept(tmp_path):
    path = tmp_path / "readings.jsonl"
    first = codec_control.Readings(path)
    first.resume(is_new=True)
    assert not path.exists()
    assert first.of(2, 0.5) == 0.5
    first.write([2.0, 1.0, 0.5])
    first.write([4.0, 1.0, 0.25])
    with path.open("a") as file:
        file.write("\n[6.0, 0.")  # of a process that was killed
    second = codec_control.Readings(path)
    second.resume(is_new=False)
    assert [second.of(step, 9.0) for step in (2, 4, 6)] == [0.5, 0.25, 9.0]
    before = path.read_text()
    second.write([2.0, 1.0, 9.0])
    assert path.read_text() == before
    second.write([6.0, 1.0, 9.0])
    third = codec_control.Readings(path)
    third.resume(is_new=False)
    assert third.of(6, 1.0) == 9.0


def test_readings_of_an_attempt_that_saved_nothing_do_not_count(tmp_path):
    path = tmp_path / "readings.jsonl"
    codec_control.Readings(path).write([2, 0.5])
    anew = codec_control.Readings(path)
    anew.resume(is_new=True)
    assert anew.of(2, 7.0) == 7.0
    anew.write([4, 0.75])
    later = codec_control.Readings(path)
    later.resume(is_new=False)
    assert later.of(2, 7.0) == 7.0
    assert later.of(4, 7.0) == 0.75


def test_gradients_that_are_no_numbers_have_no_cosine():
    one = {"a": np.float32([1, 2]), "b": np.float32([[3]])}
    assert codec_control.similarity(one, one) == pytest.approx(1)
    other = {"a": np.float32([-1, -2]), "b": np.float32([[-3]])}
    assert codec_control.similarity(one, other) == pytest.approx(-1)
    spoiled = {"a": one["a"] * np.nan, "b": one["b"]}
    assert codec_control.similarity(one, spoiled) == -1
    small = {name: 1e-13 * value for name, value in one.items()}
    assert codec_control.similarity(one, small) == pytest.approx(1)
    assert codec_control.similarity(small, small) == pytest.approx(1)
    nothing = {"a": np.zeros(2, np.float32), "b": np.zeros((1, 1), np.float32)}
    assert codec_control.similarity(one, nothing) == -1
