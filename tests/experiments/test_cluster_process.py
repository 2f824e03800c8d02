"""A cluster's process: what the audit log has of its beginning and its end."""

import types

import configured
import pytest

from experiments import cluster_process
from experiments.m3 import config


@pytest.mark.parametrize(
    ("status", "event"), [(0, "ended"), (130, "stopped"), (3, "stopped")]
)
def test_a_cluster_that_has_not_taken_its_last_step_has_stopped(
    status, event, tmp_path, monkeypatch
):
    events = []
    recorder = types.SimpleNamespace(
        record=lambda kind, **what: events.append(what["event"]), close=lambda: None
    )
    monkeypatch.setattr(cluster_process.connect, "recorder", lambda *_: recorder)
    monkeypatch.setattr(cluster_process.cluster, "run", lambda *given: given[-1]())

    run = configured.run(config, "--cluster=generator:0", workdir=tmp_path)
    assert cluster_process.run(run, {}, lambda run: status) == status
    assert events == ["began", event]

    def fail(run):
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        cluster_process.run(run, {}, fail)
    assert events[2:] == ["began", "stopped"]
