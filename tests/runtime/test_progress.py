import json

import numpy as np
import pytest

from nebula_jax.communication.wire import activity
from nebula_jax.runtime import progress
from nebula_jax.training import metrics


class Link:
    """A link that has moved so many bytes, and waited so many seconds."""

    def __init__(self, sent, received, waited):
        self._moved = {"sent": sent, "received": received}
        self.waited = waited

    def bytes_moved(self, direction):
        return self._moved[direction]


def take(record, steps, first=1):
    for step in range(first, first + steps):
        record.step(step, {"loss": np.float32(step), "tokens": np.int32(10)})


def test_means_are_logged_and_tokens_added_up(tmp_path, capsys):
    record = progress.Progress(tmp_path, "g:0", start=0, steps=5, log_every=2)
    take(record, 5)
    record.evaluation(5, {"en": {"auc": 0.5}, "de": {"auc": 0.75}})
    record.finish(5, {"pairs": 3})
    losses = [each for each in metrics.read(tmp_path / "g-0") if "loss" in each]
    assert [(each["step"], each["loss"]) for each in losses] == [
        (2, 1.5), (4, 3.5), (5, 5.0),
    ]  # fmt: skip
    (held_out,) = [
        each for each in metrics.read(tmp_path / "g-0") if "held_out_auc" in each
    ]
    assert held_out["held_out_auc"] == {"en": 0.5, "de": 0.75}
    summary = json.loads((tmp_path / "g-0" / "summary.json").read_text())
    assert (summary["first_step"], summary["last_step"]) == (1, 5)
    assert (summary["tokens"], summary["pairs"]) == (50, 3)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_command_that_took_no_step_leaves_the_summary_as_it_was(tmp_path):
    first = progress.Progress(tmp_path, "whole", start=0, steps=3, log_every=2)
    take(first, 3)
    first.finish(3, {})
    path = tmp_path / "whole" / "summary.json"
    before = path.read_text()
    progress.Progress(tmp_path, "whole", start=3, steps=3, log_every=2).finish(3, {})
    assert path.read_text() == before


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
