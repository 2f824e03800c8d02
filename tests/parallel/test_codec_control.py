"""The rule that chooses codecs, alone and on lines that a formula stands for."""

import dataclasses

import numpy as np
import pytest

from nebula_jax.parallel import codec_control, codec_tape
from nebula_jax.parallel.codec_control import Probe, Rungs

EVERY, DELAY = 5, 2
SIZES = (1000, 500, 250, 120, 60)
POLICY = codec_control.Policy(EVERY, DELAY, 0.98, (SIZES, SIZES))
WAITS, COMPUTES = 2.0, 1.0


def probes(*figures):
    """Probes of (rungs, forward, backward, line_bound), in turn."""
    return [
        Probe(EVERY * (number + 1), Rungs(*rungs), *rest)
        for number, (rungs, *rest) in enumerate(figures)
    ]


def decided(*figures):
    return codec_control.decide(POLICY, codec_control.History(probes(*figures)))


GOOD = (0.99, 0.99, WAITS)


def test_it_begins_at_the_gentlest():
    assert decided() == Rungs(0, 0)


def test_one_rung_harder_after_four_good_probes_and_only_if_the_line_is_waited_for():
    assert decided(*[((0, 0), *GOOD)] * 3) == Rungs(0, 0)
    assert decided(*[((0, 0), *GOOD)] * 4) == Rungs(1, 1)
    for bad in ((0.97, 0.99, WAITS), (0.99, 0.97, WAITS), (0.99, 0.99, COMPUTES)):
        figures = [((0, 0), *GOOD)] * 3 + [((0, 0), *bad)]
        assert decided(*figures) == Rungs(0, 0)


def test_what_crosses_less_is_left_as_it_is():
    assert decided(*[((2, 1), *GOOD)] * 4) == Rungs(2, 2)
    assert decided(*[((1, 3), *GOOD)] * 4) == Rungs(2, 3)
    assert decided(*[((4, 4), *GOOD)] * 9) == Rungs(4, 4)


def test_one_rung_gentler_after_two_bad_probes_in_the_direction_that_is_to_blame():
    forward, backward = (0.9, 0.9, WAITS), (0.99, 0.9, WAITS)
    assert decided(((2, 2), *forward)) == Rungs(2, 2)
    assert decided(*[((2, 2), *forward)] * 2) == Rungs(1, 2)
    assert decided(*[((2, 2), *backward)] * 2) == Rungs(2, 1)
    assert decided(*[((0, 2), *forward)] * 2) == Rungs(0, 1)
    assert decided(((2, 2), *forward), ((2, 2), *GOOD)) == Rungs(2, 2)
    # Those of other rungs do not count.
    assert decided(((3, 3), *forward), ((2, 3), *forward)) == Rungs(2, 3)


def test_one_rung_gentler_where_bytes_are_to_be_had():
    room = (0.99, 0.99, COMPUTES)
    assert decided(*[((2, 2), *room)] * 3) == Rungs(2, 2)
    assert decided(*[((2, 2), *room)] * 4) == Rungs(1, 1)
    assert decided(*[((0, 0), *room)] * 9) == Rungs(0, 0)


def test_the_other_direction_is_gentler_where_one_has_no_gentler_rung():
    bad, room = (0.99, 0.9, WAITS), (0.99, 0.99, COMPUTES)
    assert decided(*[((2, 0), *bad)] * 2) == Rungs(1, 0)
    assert decided(*[((2, 0), *room)] * 4) == Rungs(1, 0)
    assert decided(*[((0, 2), *room)] * 4) == Rungs(0, 1)
    assert decided(*[((0, 0), *bad)] * 2) == Rungs(0, 0)


def test_rungs_that_were_left_are_tried_again_later_and_later():
    bad = (0.9, 0.9, WAITS)
    once = [((0, 0), *GOOD)] * 4 + [((1, 1), *bad)] * 2
    once += [((0, 1), *bad)] * 2 + [((0, 0), *GOOD)] * 7
    assert decided(*once) == Rungs(0, 0)
    assert decided(*once, ((0, 0), *GOOD)) == Rungs(1, 1)


def run(line, cosines, steps=2000, compute=1.0, every=EVERY):
    """A run on a line of so many bytes a second; returns its tape and step times.

    line: step -> bytes a second.
    cosines: of each rung.
    """
    policy = dataclasses.replace(POLICY, every=every)
    tape, times = codec_tape.Tape(policy), []
    for step in range(1, steps + 1):
        rungs = tape.rungs(step)
        wire = max(SIZES[rung] for rung in rungs) / line(step)
        times.append(max(compute, wire))
        if tape.is_probed(step):
            forward = cosines[rungs.forward]
            both = forward * cosines[rungs.backward]
            row = codec_tape.as_row(Probe(step, rungs, forward, both, wire / compute))
            tape.write(codec_tape.of_row(row))
    return tape, np.array(times)


COSINES = (1.0, 0.9999, 0.995, 0.96, 0.8)


@pytest.mark.parametrize(
    ("rate", "wanted"), [(10.0, 2), (100.0, 2), (300.0, 2), (600.0, 1), (2000.0, 0)]
)
def test_it_settles_on_the_gentlest_that_the_line_takes_or_the_hardest_of_quality(
    rate, wanted
):
    tape, times = run(lambda step: rate, COSINES)
    best = min(max(1.0, SIZES[rung] / rate) for rung in (0, 1, 2))
    assert times[-500:].mean() <= 1.05 * best
    last = [max(tape.rungs(step)) for step in range(1500, 2000)]
    assert np.mean(np.array(last) == wanted) > 0.9


def test_it_follows_a_line_that_changes():
    tape, times = run(lambda step: 2000.0 if step < 1000 else 250.0, COSINES)
    assert tape.rungs(999) == Rungs(0, 0)
    assert times[-500:].mean() <= 1.05
    assert max(tape.rungs(2000)) == 2


def test_a_rung_that_costs_quality_is_not_used_for_long():
    tape, _ = run(lambda step: 10.0, COSINES, steps=4000)
    used = np.array([max(tape.rungs(step)) for step in range(1, 4001)])
    assert np.mean(used > 2) < 0.05
    assert used[: 4 * POLICY.soon].max() == 0


def test_a_front_that_loses_what_the_back_does_not_gets_gentler_codecs_forward():
    """The front's gradients suffer from codecs that leave the back's as they are."""
    backs, fronts = (1.0, 0.9999, 0.99, 0.96, 0.8), (1.0, 0.999, 0.97, 0.9, 0.7)
    tape, bad, steps = codec_tape.Tape(POLICY), 0, 6000
    for step in range(1, steps + 1):
        rungs = tape.rungs(step)
        bad += fronts[rungs.forward] < POLICY.quality
        if tape.is_probed(step):
            rate = 50.0 if step < steps // 2 else 1e6
            wire = max(SIZES[rung] for rung in rungs) / rate
            cosines = backs[rungs.forward], fronts[rungs.forward]
            tape.write(Probe(step, rungs, *cosines, wire))
    assert bad < 0.05 * steps
    assert tape.rungs(steps) == Rungs(0, 0)  # the line got faster


def test_probes_come_sooner_while_new_rungs_are_sought():
    every, soon = 80, 10
    policy = dataclasses.replace(POLICY, every=every)

    def after(*figures):
        history = codec_control.History(probes(*figures))
        found = codec_control.next_probe(policy, history)
        return found - EVERY * len(figures)

    good, bad, room = GOOD, (0.9, 0.9, WAITS), (0.99, 0.99, COMPUTES)
    assert after() == soon
    assert after(((0, 0), *good)) == soon  # asks for the next
    assert after(((0, 0), *room)) == every  # fast enough, and the gentlest
    assert after(*[((4, 4), *good)] * 2) == every  # nothing comes behind
    assert after(((2, 2), *bad)) == soon
    assert after(((0, 0), *bad)) == every  # nothing is gentler
    assert after(((2, 2), *room)) == soon  # others may do
    left = [((0, 0), *good)] * 4 + [((1, 1), *bad)] * 2 + [((0, 1), *bad)] * 2
    assert after(*left, ((0, 0), *good)) == every  # the next was left


def test_a_settled_run_is_probed_every_so_many_steps_and_no_more():
    tape, _ = run(lambda step: 300.0, (1.0, 0.9999, 0.995, 0.9, 0.8), every=40)
    steps = np.array([probe.step for probe in tape.probes])
    assert max(tape.rungs(100)) == 2  # 2 rungs of 4 probes, each after 5 steps
    assert np.mean(np.diff(steps[steps > 500]) == 40) > 0.8


def test_a_long_tape_is_written_in_time_that_grows_with_its_length():
    """As many decisions look at as many probes at its end as at its beginning."""
    policy = codec_control.Policy(1, 1, 0.98, ((4, 2, 1), (0,)))
    looked_at = 0

    class Here(list):
        def __getitem__(self, which):
            nonlocal looked_at
            found = super().__getitem__(which)
            looked_at += len(found) if isinstance(which, slice) else 1
            return found

    counts = []
    history = codec_control.History()
    for number in range(1, 2001):
        history.add(Probe(number, Rungs(), 1.0, 1.0, COMPUTES))
        history.here = Here(history.here)
        looked_at = 0
        codec_control.decide(policy, history)
        counts.append(looked_at)
    assert max(counts[1000:]) <= max(counts[:100])


def test_a_decision_comes_with_the_next_probe_at_the_latest():
    with pytest.raises(ValueError, match="after 1 to 5 steps, with the next probe at"):
        dataclasses.replace(POLICY, delay=6)
