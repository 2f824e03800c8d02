"""Faults never change the numbers: kill anything, start again, same parameters."""

import signal
import time

import jax
import numpy as np
import psutil
import pytest

STEPS, EVERY = 36, 4
CLUSTERS = ("discriminator", "generator-0", "generator-1")


def flags(workdir):
    return {"steps": STEPS, "checkpoint_every": EVERY, "workdir": workdir}


@pytest.fixture(scope="module")
def undisturbed(runs):
    """A run that was never stopped."""
    status, output = runs.run(**flags("undisturbed"))
    assert status == 0, output
    return {cluster: runs.state("undisturbed", cluster, STEPS) for cluster in CLUSTERS}


def start_and_wait(runs, workdir, step):
    """Starts a run; returns it and its clusters once `step` is saved everywhere."""
    process = runs.start(**flags(workdir))
    manifests = [
        runs.folder / workdir / cluster / "checkpoints" / f"{step:08d}.json"
        for cluster in CLUSTERS
    ]
    deadline = time.monotonic() + 60
    while not all(manifest.exists() for manifest in manifests):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        for argument in child.cmdline():
            if argument.startswith("--cluster="):
                family[argument.partition("=")[2]] = child
    return process, family


def assert_all_gone(family):
    _, alive = psutil.wait_procs(family.values(), timeout=10)
    assert not alive, f"left behind: {alive}"


def assert_goes_on_to_the_end(runs, workdir, undisturbed):
    """The same command again: the same parameters, bit for bit. Returns its output."""
    status, output = runs.run(**flags(workdir))
    assert status == 0, output
    assert "going on after step" in output
    for cluster in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state(workdir, cluster, STEPS),
            undisturbed[cluster],
        )
    return output


def test_a_run_whose_processes_are_killed_one_by_one_ends_bit_for_bit_the_same(
    runs, undisturbed
):
    """SIGKILL of each kind of process in turn, the same command after each."""
    for step, victim in ((8, "generator:1"), (16, "discriminator"), (24, "launcher")):
        process, family = start_and_wait(runs, "killed", step)
        (process if victim == "launcher" else family[victim]).kill()
        output, _ = process.communicate(timeout=30)
        assert_all_gone(family)
        if victim != "launcher":
            assert process.returncode == 1
            last = output.strip().splitlines()[-1]
            assert last == f"error: {victim} was killed by SIGKILL; all clusters ended"
    assert_goes_on_to_the_end(runs, "killed", undisturbed)


def test_ctrl_c_saves_one_step_everywhere_and_a_damaged_checkpoint_is_left_aside(
    runs, undisturbed
):
    process, family = start_and_wait(runs, "interrupted", 2 * EVERY)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "stopping, all clusters save step" in output
    assert_all_gone(family)
    folders = [runs.folder / "interrupted" / name / "checkpoints" for name in CLUSTERS]
    newest = {max(folder.glob("*.json")).stem for folder in folders}
    assert len(newest) == 1

    # Damage the newest one of one cluster: all go on from the step before.
    (step,) = newest
    victim = max(
        (path for path in (folders[1] / step).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    victim.write_bytes(victim.read_bytes()[:100])
    output = assert_goes_on_to_the_end(runs, "interrupted", undisturbed)
    assert f"[generator:0] checkpoint of step {int(step)} in " in output
    before = [
        int(line.split()[-1]) for line in output.splitlines() if "going on" in line
    ]
    assert len(before) == 3
    assert len(set(before)) == 1
    assert 0 < before[0] < int(step)


def test_a_folder_with_another_run_is_not_overwritten(runs, undisturbed):
    status, output = runs.run(**flags("undisturbed") | {"batch_size": 8})
    assert status == 1
    words = "undisturbed holds a run with --batch_size=4, this one has 8"
    assert words in output
