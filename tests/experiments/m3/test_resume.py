"""Faults never change the numbers: kill anything, start again, same parameters.

A short run that is killed at two moments is in test_pretrain_m3.py.
"""

import json
import resource
import signal
import time

import configured
import pytest
import tiny_runs

from experiments.m3 import config, data
from experiments.pretraining import vocabulary as shared_vocabulary

STEPS, EVERY = 38, 4  # the last step is no multiple: it has a checkpoint of its own
CLUSTERS = ("discriminator", "generator-0", "generator-1")


def flags(workdir):
    return {"steps": STEPS, "checkpoint_every": EVERY, "workdir": workdir}


@pytest.fixture(scope="module")
def undisturbed(runs):
    """A run that was never stopped."""
    runs.finished(**flags("undisturbed"))


def start_and_wait(runs, workdir, step):
    """Starts a run; returns it and its clusters once `step` is saved everywhere.

    Its steps take so long that it has not ended before the test does something to it.
    """
    slow = {"emulate_compute": "0,100"}
    return runs.start_and_wait(step=step, folders=CLUSTERS, **flags(workdir), **slow)


def assert_goes_on_to_the_end(runs, workdir):
    """The same command again: the same parameters, bit for bit. Returns its output."""
    output = runs.finished(**flags(workdir))
    assert "going on after step" in output
    runs.assert_same(workdir, "undisturbed", CLUSTERS, STEPS)
    return output


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_one_by_one_ends_bit_for_bit_the_same(
    runs, undisturbed
):
    """SIGKILL of each kind of process in turn, the same command after each."""
    for step, victim in ((8, "generator:1"), (16, "discriminator"), (24, "launcher")):
        process, family = start_and_wait(runs, "killed", step)
        (process if victim == "launcher" else family[victim]).kill()
        output, _ = process.communicate(timeout=30)
        tiny_runs.assert_all_gone(family)
        if victim != "launcher":
            assert process.returncode == 1
            last = output.strip().splitlines()[-1]
            words = f"error: {victim} was killed by SIGKILL; all clusters ended"
            assert last == f"{words}; the same command goes on from the last checkpoint"
    assert_goes_on_to_the_end(runs, "killed")


@pytest.mark.slow
def test_a_line_that_breaks_for_seconds_changes_no_number(runs, undisturbed):
    # On a slow machine nothing is under way before the last of them.
    line = ",".join(f"cut=2s@{second}s" for second in (1, 5, 9, 20, 40))
    output = runs.finished(**flags("cut"), wan=line, peer_timeout=0.6, window=8)
    assert "waiting for it to come back" in output
    assert "is back after" in output
    runs.assert_same("cut", "undisturbed", CLUSTERS, STEPS)
    for cluster in CLUSTERS[1:]:
        path = runs.folder / "cut" / cluster / "summary.json"
        outages = json.loads(path.read_text())["outages"]
        assert outages["count"] >= 1
        # Step t waits for the token of step t - 9, so nine steps may be in flight, and
        # the held-out text, two tensors, of three evaluations among them.
        assert 1 <= outages["tensors"] <= 9 + 3 * 2
        assert outages["seconds"] > 1
    assert "lost its line" in output


@pytest.mark.slow
def test_a_stopped_run_saves_one_step_everywhere_and_damage_is_left_aside(
    runs, undisturbed
):
    folders = [runs.folder / "stopped" / name / "checkpoints" for name in CLUSTERS]
    for step, asked in ((EVERY, "generator:1"), (4 * EVERY, "launcher")):
        process, family = start_and_wait(runs, "stopped", step)
        if asked == "launcher":
            process.send_signal(signal.SIGINT)  # Ctrl-C
        else:
            family[asked].terminate()
        output, _ = process.communicate(timeout=30)
        expected = signal.SIGINT if asked == "launcher" else signal.SIGTERM
        assert process.returncode == 128 + expected, output
        assert "stopping, all clusters save step" in output
        tiny_runs.assert_all_gone(family)
        newest = {max(folder.glob("[0-9]" * 8)).name for folder in folders}
        assert len(newest) == 1

    # Damage the newest one of one cluster: all go on from the step before.
    (step,) = newest
    victim = max(
        (path for path in (folders[1] / step).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    victim.write_bytes(victim.read_bytes()[:100])
    output = assert_goes_on_to_the_end(runs, "stopped")
    assert f"[generator:0] checkpoint of step {int(step)} in " in output
    before = [
        int(line.split()[-1]) for line in output.splitlines() if "going on" in line
    ]
    assert len(before) == 3
    assert len(set(before)) == 1
    assert 0 < before[0] < int(step)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_is_named(runs, monkeypatch):
    """Files that may not grow beyond 100 kB: no checkpoint fits.

    In one process and with one generator, which is soon compiled.
    """
    given = {"generators": "en", "task_mix": "mrtd", "workdir": "full", "steps": 1}
    # Vocabulary and text would be too large as well.
    prepared = {"prepared_dir": runs.folder / "prepared"}
    run = data.checked(configured.run(config, **runs.flags() | prepared | given))
    run = run.with_local(vocabulary=str(data.shared_vocabulary(run)))
    data.text_of(run, 0, shared_vocabulary.given(run.local))
    # Half of a compiled program would stay in the cache, where others would find it.
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1e6")
    process = runs.start(cluster="whole", **given)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: could not save step 1 in full/discriminator/")
    assert "File too large" in last
    for printed_by_threads in ("Traceback", "Event loop is closed"):
        assert printed_by_threads not in output


@pytest.mark.slow
def test_a_run_moves_between_one_process_and_several_bit_for_bit(runs, undisturbed):
    """Fig. 8: begun in one process, gone on over three clusters, and back."""
    for cluster, step in (("whole", 8), ("all", 20)):
        process = runs.start(cluster=cluster, **flags("moved"))
        saved = [
            runs.folder / "moved" / each / f"checkpoints/{step:08d}"
            for each in CLUSTERS
        ]
        while not all(each.exists() for each in saved):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        process.terminate()
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM, output
    output = runs.finished(cluster="whole", **flags("moved"))
    assert "going on after step" in output
    runs.assert_same("moved", "undisturbed", CLUSTERS, STEPS)
