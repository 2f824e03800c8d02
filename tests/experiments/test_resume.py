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


def assert_resumes_to(runs, workdir, undisturbed):
    status, output = runs.run(**flags(workdir))
    assert status == 0, output
    assert "going on after step" in output
    for cluster in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state(workdir, cluster, STEPS),
            undisturbed[cluster],
        )


@pytest.mark.parametrize("victim", ["generator:1", "discriminator", "launcher"])
def test_a_killed_run_goes_on_bit_for_bit(runs, undisturbed, victim):
    workdir = f"killed-{victim.replace(':', '-')}"
    process, family = start_and_wait(runs, workdir, 2 * EVERY)
    (process if victim == "launcher" else family[victim]).kill()
    output, _ = process.communicate(timeout=30)
    assert_all_gone(family)
    if victim != "launcher":
        assert process.returncode == 1
        last = output.strip().splitlines()[-1]
        assert last == f"error: {victim} was killed by SIGKILL; all clusters ended"
    assert_resumes_to(runs, workdir, undisturbed)


def test_ctrl_c_saves_the_same_step_everywhere_and_says_so(runs, undisturbed):
    process, family = start_and_wait(runs, "interrupted", EVERY)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "stopping, all clusters save step" in output
    assert_all_gone(family)
    newest = [
        max((runs.folder / "interrupted" / cluster / "checkpoints").glob("*.json")).name
        for cluster in CLUSTERS
    ]
    assert len(set(newest)) == 1
    assert_resumes_to(runs, "interrupted", undisturbed)


def test_a_truncated_checkpoint_is_told_and_the_one_before_is_used(runs, undisturbed):
    process, family = start_and_wait(runs, "truncated", 3 * EVERY)
    process.kill()
    process.communicate(timeout=30)
    assert_all_gone(family)
    folder = runs.folder / "truncated" / "generator-0" / "checkpoints"
    newest = max(path for path in folder.iterdir() if path.is_dir())
    victim = max(
        (path for path in newest.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    victim.write_bytes(victim.read_bytes()[:100])
    status, output = runs.run(**flags("truncated"))
    assert status == 0, output
    assert f"checkpoint of step {int(newest.name)} in " in output
    assert "is damaged" in output
    for cluster in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state("truncated", cluster, STEPS),
            undisturbed[cluster],
        )


def test_a_folder_with_another_run_is_not_overwritten(runs, undisturbed):
    status, output = runs.run(**flags("undisturbed") | {"batch_size": 8})
    assert status == 1
    words = "undisturbed holds a run with --batch_size=4, this one has 8"
    assert words in output
