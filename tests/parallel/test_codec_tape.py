"""The tape of a choice of codecs: saved, and what it refuses."""

import numpy as np
import pytest

from nebula_jax.parallel import codec_control, codec_tape
from nebula_jax.parallel.codec_control import Probe, Rungs

EVERY, DELAY = 5, 2
SIZES = (1000, 500, 250)
POLICY = codec_control.Policy(EVERY, DELAY, 0.98, (SIZES, SIZES))


def test_a_tape_that_was_saved_goes_on_as_it_was():
    tape = codec_tape.Tape(POLICY)
    for step in range(1, 201):
        if tape.is_probed(step):
            rungs = tape.rungs(step)
            cosine = (1.0, 0.99, 0.96)[max(rungs)]
            row = codec_tape.as_row(Probe(step, rungs, cosine, cosine, 2.0))
            tape.write(codec_tape.of_row(row))
    other = codec_tape.Tape(POLICY)
    other.resume(tape.rows)
    assert other.probes == tape.probes
    assert tape.rows.shape == (len(tape.probes), 6)
    half = codec_tape.Tape(POLICY)
    half.resume(tape.rows[:20])
    assert half.probes == tape.probes[:20]
    last = half.probes[-1].step
    for step in range(1, last + POLICY.soon + DELAY):
        assert half.rungs(step) == tape.rungs(step)
    following = [step for step in range(last, 201) if half.is_probed(step)]
    assert following == [tape.probes[20].step]
    assert tape.following == tape.rungs(tape.probes[-1].step + DELAY)
    assert {max(probe.rungs) for probe in tape.probes} == {0, 1, 2}


def test_what_cannot_follow_is_refused():
    tape = codec_tape.Tape(POLICY)
    for probe, problem in (
        (Probe(10, Rungs(), 1, 1, 1), "a probe of step 10 where one of step 3 follows"),
        (Probe(3, Rungs(1, 0), 1, 1, 1), "where the tape has"),
        (Probe(3, Rungs(), 1.5, 1, 1), "has cosines"),
        (Probe(3, Rungs(), np.nan, 1, 1), "has cosines"),
        (Probe(3, Rungs(), 1, 1, np.inf), "a ratio of times of inf"),
        (Probe(3, Rungs(), 1, 1, -1), "a ratio of times of -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            tape.write(probe)


def test_a_row_without_whole_numbers_is_refused():
    for row in ([3, 0.5, 0, 1, 1, 1], [np.nan, 0, 0, 1, 1, 1], [3, 0, np.inf, 1, 1, 1]):
        with pytest.raises(ValueError, match=r"a probe of step \S+ with rungs"):
            codec_tape.of_row(np.asarray(row, np.float32))
