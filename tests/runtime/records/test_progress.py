import json

import numpy as np
import pytest

from nebula_jax import trace as trace_lib
from nebula_jax.communication.wire import activity, frames
from nebula_jax.runtime.life import phases, process
from nebula_jax.runtime.records import progress
from nebula_jax.training import metrics


class Link:
    """A link that has moved so many bytes, and waited so many seconds."""

    def __init__(self, sent, received, waited, peer="d", round_trip=0.0):
        self._moved = {"sent": sent, "received": received}
        self.waited, self.round_trip = waited, round_trip
        self.peer = frames.Hello(peer, "1", {})

    def bytes_moved(self, direction):
        return self._moved[direction]


def take(record, steps, first=1):
    for step in range(first, first + steps):
        record.step(step, {"loss": np.float32(step), "tokens": np.int32(10)})


def test_means_are_logged_and_tokens_added_up(tmp_path, capsys):
    record = progress.Progress(tmp_path, "g:0", start=0, steps=5, log_every=2)
    take(record, 5)
    record.evaluation(5, {"en": {"auc": 0.5}, "de": {"auc": 0.75, "loss": 2.0}})
    record.finish(5, {"pairs": 3})
    losses = [each for each in metrics.read(tmp_path / "g-0") if "loss" in each]
    assert [(each["step"], each["loss"]) for each in losses] == [
        (2, 1.5), (4, 3.5), (5, 5.0),
    ]  # fmt: skip
    (held_out,) = [
        each for each in metrics.read(tmp_path / "g-0") if "held_out_auc" in each
    ]
    assert held_out["held_out_auc"] == {"en": 0.5, "de": 0.75}
    assert held_out["held_out_loss"] == {"de": 2.0}
    summary = json.loads((tmp_path / "g-0" / "summary.json").read_text())
    assert (summary["first_step"], summary["last_step"]) == (1, 5)
    assert (summary["tokens"], summary["pairs"]) == (50, 3)
    first, last = (
        capsys.readouterr().out.splitlines()
    )  # none between: it is no terminal
    assert "step      2/5" in first
    assert "step      5/5 100%" in last


def test_a_command_that_took_no_step_leaves_summary_and_trace_as_they_were(tmp_path):
    def finished(start):
        work = activity.Work(trace=trace_lib.Trace(is_on=True))
        made = progress.Progress(tmp_path, "g", start, 3, log_every=2, work=work)
        if not start:
            take(made, 3)
        made.finish(3, {})
        paths = [tmp_path / "g" / name for name in ("summary.json", "trace.json")]
        return [path.read_bytes() for path in paths]

    assert finished(0) == finished(3)


def test_traffic_is_of_all_links_together(tmp_path):
    links = [Link(1, 2, 0.5), Link(10, 20, 1.0)]
    assert progress.traffic(links) == progress.Traffic(11, 22, 1.5)
    assert progress.traffic([]) == progress.Traffic()
    record = progress.Progress(
        tmp_path, "d", start=4, steps=6, log_every=1, links=links
    )
    links[0].waited += 3.0
    take(record, 2, first=5)
    record.finish(6, {})
    summary = json.loads((tmp_path / "d" / "summary.json").read_text())
    assert (summary["first_step"], summary["last_step"]) == (5, 6)
    assert (summary["bytes_sent"], summary["bytes_received"]) == (11, 22)
    assert summary["waited_seconds"] == pytest.approx(3.0)


def test_a_record_says_who_was_waited_for_and_how_far_away_the_peers_are(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(process, "_log_format", ["json"])
    links = [Link(0, 0, 5.0, "a", 0.002), Link(0, 0, 0.0, "b")]
    links.append(Link(0, 0, 0.0, "a"))  # it has rejoined
    record = progress.Progress(tmp_path, "d", 0, 4, 2, links, delay=0.03)
    links[0].waited += 1.0
    links[2].waited += 2.0
    links[1].waited += 0.5
    links[1]._moved["sent"] += 1_000_000
    take(record, 2)
    found = metrics.read(tmp_path / "d")[-1]
    assert found["round_trip"] == {"a": pytest.approx(0.032)}
    waits = found["waiting_for"]
    assert waits["a"] / waits["b"] == pytest.approx(6.0)
    assert found["waiting_share"] == pytest.approx(waits["a"] + waits["b"])
    rate = 8.0 / (0.5 / waits["b"])  # Mbit in so many seconds
    assert found["sent_mbit"] == pytest.approx(rate)
    assert found["received_mbit"] == 0.0
    assert found["steps_left"] == 2
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert shown == {"cluster": "d"} | {
        name: value for name, value in found.items() if name != "time"
    }


def test_the_time_left_leaves_out_what_the_first_step_took(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    record = progress.Progress(tmp_path, "d", 0, 10, 4)
    for step, seconds in enumerate([50.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], 1):
        now[0] += seconds
        take(record, 1, first=step)
    first, second = metrics.read(tmp_path / "d")
    assert (first["steps_left"], first["seconds_left"]) == (6, 6.0)
    assert (second["steps_left"], second["seconds_left"]) == (2, 4.0)
    assert first["steps_per_second"] == 4 / 53


def test_phases_end_with_the_first_step_and_are_in_the_summary(tmp_path):
    until = phases.Phases("d")
    until.enter("compiling")
    record = progress.Progress(tmp_path, "d", 0, 2, 1, phases=until)
    take(record, 2)
    record.finish(2, {})
    summary = json.loads((tmp_path / "d" / "summary.json").read_text())
    assert {"preparing", "compiling"} <= summary["until_first_step"].keys()


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.written, self.is_closed = [], False

    def write(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def test_a_tracker_gets_what_the_files_get(tmp_path):
    kept = Kept()
    record = progress.Progress(tmp_path, "d", 0, 2, 1, trackers=lambda: kept)
    take(record, 2)
    record.evaluation(2, {"en": {"auc": 0.5}})
    record.finish(2, {})
    found = [
        (each["step"], {k: v for k, v in each.items() if k not in ("step", "time")})
        for each in metrics.read(tmp_path / "d")
    ]
    assert kept.written == found
    assert kept.is_closed


def test_steps_are_counted_for_the_peers(tmp_path):
    work = activity.Work()
    record = progress.Progress(
        tmp_path, "g:0", start=0, steps=5, log_every=2, work=work
    )
    assert work.report(False).activity is activity.Activity.STARTING
    take(record, 3)
    record.finish(3, {})
    assert work.report(False) == (activity.Activity.COMPUTING, 3)
    assert work.stuck_timeout == activity.LEAST_SECONDS


def losses(record, *values, first=1):
    """Takes steps of these losses; NaN is of a step that was skipped."""
    for step, loss in enumerate(values, first):
        outcome = {"loss": np.float32(loss), "is_finite": np.isfinite(loss)}
        record.step(step, outcome | {"tokens": np.int32(10)})


def test_skipped_steps_are_counted_and_left_out_of_the_means(tmp_path, capsys):
    record = progress.Progress(tmp_path, "g", 0, 8, log_every=4, allow_nonfinite=3)
    losses(record, 1, np.nan, 3, 5, np.nan, np.nan)
    record.finish(6, {})
    found = metrics.read(tmp_path / "g")
    assert [
        (each["step"], each["skipped_steps"]) for each in found if "loss" not in each
    ] == [(2, 1), (5, 2), (6, 3)]
    means = {each["step"]: each["loss"] for each in found if "loss" in each}
    assert means[4] == 3.0
    assert np.isnan(means[6])
    summary = json.loads((tmp_path / "g" / "summary.json").read_text())
    assert (summary["skipped_steps"], summary["tokens"]) == (3, 60)
    for line in (tmp_path / "g" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert "g: the loss of step 2 is nan: skipped, 1 of 3\n" in capsys.readouterr().err
    # What was skipped after the checkpoint that a run goes on from comes again.
    again = progress.Progress(tmp_path, "g", 5, 8, log_every=4, allow_nonfinite=3)
    losses(again, np.nan, np.nan, first=6)
    words = "^g: the loss of step 7 is nan.*_nonfinite=3"
    with pytest.raises(progress.NonfiniteError, match=words):
        again.settle()


class Flag:
    """A flag on a device that may still be at its step."""

    def __init__(self):
        self.is_ready = False

    def __bool__(self):
        assert self.is_ready
        return True


def test_a_step_is_waited_for_when_the_next_one_has_been_taken(tmp_path):
    record = progress.Progress(tmp_path, "g", start=0, steps=9, log_every=9)
    flags = [Flag(), Flag()]
    step = {"loss": np.float32(1), "tokens": np.int32(1)}
    record.step(1, step | {"is_finite": flags[0]})
    flags[0].is_ready = True
    record.step(2, step | {"is_finite": flags[1]})
    flags[1].is_ready = True
    record.settle()


def outcome(loss, is_finite=False):
    return {"loss": np.float32(loss), "is_finite": np.bool_(is_finite)}


def test_parameters_that_a_step_has_spoilt_are_not_saved():
    skips = progress.Skips("g:0", allowed=2)
    state = {"model": {"params": {"w": np.float32([1.0, np.nan])}, "at": np.int32(1)}}
    skips.check(state)  # no step has made it
    skips.take(1, outcome(2.5))
    skips.check({"params": {"w": np.ones(2, np.float32)}, "best": np.float32(np.inf)})
    with pytest.raises(progress.NonfiniteError, match="a step has made parameters"):
        skips.check(state)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.nan, "^g:0: the loss of step 7 is nan; nothing after it is saved"),
        (np.inf, "^g:0: the loss of step 7 is inf; "),
        (2.5, "^g:0: step 7 has the loss 2.5, but its gradient or the parameters"),
    ],
)
def test_without_leave_the_first_step_is_the_end(loss, words):
    skips = progress.Skips("g:0", allowed=0)
    skips.take(6, outcome(1.0, is_finite=True))
    skips.take(6, {"loss": np.float32(1.0)})  # of a step that does not tell
    with pytest.raises(progress.NonfiniteError, match=words):
        skips.take(7, outcome(loss))
