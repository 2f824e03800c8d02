"""Clusters of several processes: the same run, whoever saved what it goes on from."""

import time

import pytest
import tiny_runs
import trees

STEPS, SAVED = 20, 2
CLUSTERS = ("discriminator", "generator-0")
FLAGS = {
    "generators": "en de",
    "task_mix": "mrtd",
    "steps": STEPS,
    "checkpoint_every": SAVED,
    "devices_per_cluster": 2,
}
MANY = {"processes_per_cluster": 2}
SOON = 20.0  # seconds


@pytest.fixture(scope="module")
def alone(runs):
    """Clusters of one process with two devices, to the end."""
    runs.finished(**FLAGS, workdir="alone")
    return {cluster: runs.state("alone", cluster, STEPS) for cluster in CLUSTERS}


def assert_ended_as(alone, runs, workdir, output):
    assert "going on after step" in output
    for cluster in CLUSTERS:
        found = runs.state(workdir, cluster, STEPS)
        trees.assert_close(found, alone[cluster], rtol=0, atol=1e-6)


VICTIM = "generator:0/1"
SLOW = {"emulate_compute": "0,100"}  # so that the run does not end before it is killed


@pytest.mark.slow
def test_one_process_goes_on_from_what_two_saved(runs, alone):
    workdir = "two-then-one"
    run, _ = runs.start_and_wait(workdir, SAVED, CLUSTERS, **FLAGS, **SLOW, **MANY)
    family = tiny_runs.family_of(run)
    begin = time.monotonic()
    family[VICTIM].kill()
    output, _ = run.communicate(timeout=60)
    assert time.monotonic() - begin < SOON
    assert run.returncode == 1
    last = output.strip().splitlines()[-1]
    words = f"error: {VICTIM} was killed by SIGKILL; all clusters ended"
    assert last == f"{words}; the same command goes on from the last checkpoint"
    tiny_runs.assert_all_gone(family)
    # Its cluster's root, and the other cluster, have the reason.
    for cluster in ("generator:0", "discriminator"):
        lines = [each for each in output.splitlines() if f"[{cluster}] error" in each]
        assert "process 1 of this cluster has gone" in lines[-1]

    output = runs.finished(**FLAGS, workdir=workdir)
    assert_ended_as(alone, runs, workdir, output)


@pytest.mark.slow
def test_two_processes_go_on_from_what_one_saved(runs, alone):
    workdir = "one-then-two"
    run, family = runs.start_and_wait(workdir, SAVED, CLUSTERS, **FLAGS, **SLOW)
    run.kill()
    run.communicate(timeout=60)
    tiny_runs.assert_all_gone(family)
    output = runs.finished(**FLAGS, **MANY, workdir=workdir)
    assert "report: " in output
    assert_ended_as(alone, runs, workdir, output)
