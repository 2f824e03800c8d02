"""BERT from end to end: what several clusters compute is what one process computes."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import tiny_runs
import trees

from nebula_jax.models import pretrained
from nebula_jax.training import diloco, metrics

# In every run of the tests: M3's whole runs, and local steps in one process.
pytestmark = pytest.mark.slow

STEPS, EVERY = 20, 6
SAVED = [7, 13, 19, STEPS]  # a checkpoint waits for the round that is under way
CLUSTERS = ("cluster-0", "cluster-1")


@pytest.fixture(scope="module")
def whole(runs):
    """A run in one process, which was never stopped."""
    runs.finished(cluster="whole", steps=STEPS, checkpoint_every=EVERY, workdir="whole")
    return runs.folder / "whole"


def test_a_run_ends_bit_for_bit_the_same_after_a_kill_and_a_stop(runs, whole):
    """Two processes over an encrypted line: one is killed, and all start again; then
    one is asked to stop, and the same command goes on."""
    given = {"steps": STEPS, "checkpoint_every": EVERY, "workdir": "split"}
    slow = {"emulate_compute": 100}  # so that it has not ended before it is stopped
    process, family = runs.start_and_wait(
        step=SAVED[0], folders=CLUSTERS, restart=1, **given, **slow
    )
    family["cluster:1"].kill()
    saved = [runs.folder / "split" / each / "checkpoints" for each in CLUSTERS]
    while min(map(tiny_runs.newest, saved)) < SAVED[1]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    tiny_runs.family_of(process)["cluster:1"].terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "cluster:1 was killed by SIGKILL; all clusters start again" in output
    assert "going on after step" in output
    (step,) = set(map(tiny_runs.newest, saved))
    assert SAVED[1] <= step < STEPS
    output = runs.finished_here(**given)
    assert f"going on after step {step}" in output
    runs.assert_same("split", "whole", CLUSTERS, STEPS)
    summary = json.loads((runs.folder / "split" / "summary.json").read_text())
    assert summary["restarts"]
    # The bytes that crossed are those of the formula, but for the heads of frames.
    sizes = summary["bytes"]
    assert 1 <= sizes["sent"] / sizes["formula"] < 1.02
    assert (runs.folder / "split" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_all_clusters_end_with_the_same_parameters(runs, whole):
    one, two = (runs.state("whole", cluster, STEPS) for cluster in CLUSTERS)
    trees.assert_same(one["state"]["params"], two["state"]["params"])
    anchors = {}
    for each in one["outers"]:
        anchors |= each["anchor"]
    params = one["state"]["params"]
    (params,) = diloco.split(params, diloco.places(params))
    trees.assert_same(params, anchors)
    # Their own optimizers went their own ways.
    moments = [
        np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(each["state"]["opt_state"])]
        )
        for each in (one, two)
    ]
    assert not np.array_equal(*moments)


def test_a_run_leaves_an_encoder_and_its_figures(runs, whole):
    folder = whole / "whole" / "encoder"
    model = pretrained.load(folder)
    trained = runs.state("whole", "cluster-0", STEPS)["state"]["params"]
    np.testing.assert_array_equal(
        model.params["embeddings"]["word_embeddings"]["embedding"],
        trained["embeddings"]["word_embeddings"]["embedding"],
    )
    trees.assert_same(model.params["mlm_head"], trained["mlm_head"])
    records = [
        each for each in metrics.read(whole / "whole") if "held_out_mlm_loss" in each
    ]
    assert [each["step"] for each in records] == [0, STEPS]
    assert set(records[0]["held_out_mlm_loss"]) == {"en", "de"}
    first, last = (sum(each["held_out_mlm_loss"].values()) for each in records)
    assert last < first


def test_the_same_command_makes_up_for_an_encoder_that_could_not_be_written(
    runs, whole
):
    folder = shutil.copytree(whole, runs.folder / "full_disk")
    encoder = (folder / "whole" / "encoder").rename(runs.folder / "expected")
    given = {"steps": STEPS, "checkpoint_every": EVERY, "workdir": "full_disk"}
    runs.finished_here(cluster="whole", **given)
    for path in encoder.iterdir():
        made = folder / "whole" / "encoder" / path.name
        assert made.read_bytes() == path.read_bytes()
    runs.assert_same("full_disk", "whole", CLUSTERS, STEPS)


def test_a_run_moves_from_one_process_to_several(runs, whole):
    shutil.copytree(runs.folder / "whole", runs.folder / "moved")
    for cluster in CLUSTERS:
        shutil.rmtree(runs.folder / "moved" / cluster / "checkpoints" / f"{STEPS:08d}")
    output = runs.finished(steps=STEPS, checkpoint_every=EVERY, workdir="moved")
    assert f"going on after step {SAVED[-2]}" in output
    runs.assert_same("moved", "whole", CLUSTERS, STEPS)


@pytest.mark.parametrize("hub", ["", "1"])
def test_three_clusters_over_a_slow_line_that_breaks(runs, hub):
    """And a codec that keeps what it does not send, with a hub or without."""
    flags = {
        "clusters": 3,
        **{"delta_codec": "error_feedback(sparse_loco(8, 64), 0.9)"},
        **{"steps": 13, "checkpoint_every": 13},
    }
    names = [f"cluster-{k}" for k in range(3)]
    runs.finished(cluster="whole", workdir=f"three{hub}", **flags)
    status, output = (
        runs.run(
            workdir=f"mesh{hub}",
            hub=hub,
            wan="2mbit,5ms,cut=1s@2s",
            peer_timeout=0.6,
            **flags,
        )
        if not hub
        else runs.run(workdir=f"mesh{hub}", hub=hub, **flags)
    )
    assert status == 0, output
    runs.assert_same(f"mesh{hub}", f"three{hub}", names, 13)


def test_processes_of_a_cluster_come_to_the_parameters_of_one(runs):
    """One cluster of two processes, which add up gradients at every step."""
    flags = {
        **{"clusters": 1, "sync": "allreduce", "inner_steps": 100, "fragments": 1},
        **{"delay": 0, "steps": 10, "checkpoint_every": 10, "dropout": 0.0},
    }
    runs.finished(workdir="one", **flags)
    runs.finished(
        workdir="two", processes_per_cluster=2, **flags, devices_per_cluster=2
    )
    one, two = (
        runs.state(each, "cluster-0", 10)["state"]["params"] for each in ("one", "two")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, two)
