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


def test_a_run_that_goes_on_takes_what_was_kept(tmp_path):
    path = tmp_path / "readings.jsonl"
    first = codec_tape.Readings(path)
    first.resume(is_new=True)
    assert not path.exists()
    assert first.of(2, 0.5) == 0.5
    first.write([2.0, 1.0, 0.5])
    first.write([4.0, 1.0, 0.25])
    with path.open("a") as file:
        file.write("\n[6.0, 0.")  # of a process that was killed
    second = codec_tape.Readings(path)
    second.resume(is_new=False)
    assert [second.of(step, 9.0) for step in (2, 4, 6)] == [0.5, 0.25, 9.0]
    before = path.read_text()
    second.write([2.0, 1.0, 9.0])
    assert path.read_text() == before
    second.write([6.0, 1.0, 9.0])
    third = codec_tape.Readings(path)
    third.resume(is_new=False)
    assert third.of(6, 1.0) == 9.0


def test_readings_of_an_attempt_that_saved_nothing_do_not_count(tmp_path):
    path = tmp_path / "readings.jsonl"
    codec_tape.Readings(path).write([2, 0.5])
    anew = codec_tape.Readings(path)
    anew.resume(is_new=True)
    assert anew.of(2, 7.0) == 7.0
    anew.write([4, 0.75])
    later = codec_tape.Readings(path)
    later.resume(is_new=False)
    assert later.of(2, 7.0) == 7.0
    assert later.of(4, 7.0) == 0.75


def test_without_a_file_nothing_is_kept():
    found = codec_tape.Readings(None)
    found.resume(is_new=False)
    found.write([1, 0.5])
    assert found.of(1, 0.25) == 0.25


def test_gradients_that_are_no_numbers_have_no_cosine():
    one = {"a": np.float32([1, 2]), "b": np.float32([[3]])}
    assert codec_tape.similarity(one, one) == pytest.approx(1)
    other = {"a": np.float32([-1, -2]), "b": np.float32([[-3]])}
    assert codec_tape.similarity(one, other) == pytest.approx(-1)
    spoiled = {"a": one["a"] * np.nan, "b": one["b"]}
    assert codec_tape.similarity(one, spoiled) == -1
    small = {name: 1e-13 * value for name, value in one.items()}
    assert codec_tape.similarity(one, small) == pytest.approx(1)
    assert codec_tape.similarity(small, small) == pytest.approx(1)
    nothing = {"a": np.zeros(2, np.float32), "b": np.zeros((1, 1), np.float32)}
    assert codec_tape.similarity(one, nothing) == -1
