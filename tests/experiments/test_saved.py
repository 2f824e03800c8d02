import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import saved, shared_flags
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import checkpoint


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(checkpoint_every=100):
        yield


def test_a_run_goes_on_from_the_newest_step_that_all_have():
    steps = {"d": [100, 200], "g0": [100, 200, 300], "g1": [200, 300]}
    assert saved.newest_of_all(steps) == 200
    assert saved.newest_of_all({"d": [], "g0": []}) == 0


def test_a_run_that_ended_before_its_first_common_checkpoint_begins_anew():
    assert saved.newest_of_all({"d": [], "g0": [100]}) == 0


def test_checkpoints_are_not_thrown_away_because_one_cluster_lost_its_own():
    words = "no step is saved in all clusters .d has 800, 900; g0 has none."
    with pytest.raises(checkpoint.CheckpointError, match=words):
        saved.newest_of_all({"d": [800, 900], "g0": []})


@pytest.mark.parametrize("every", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("damaged", [False, True])
def test_enough_checkpoints_are_kept_for_a_common_one(window, every, damaged):
    """The generator as far ahead as it can be, the discriminator killed at any step."""
    keep = saved.kept(window, every)
    for done in range(5 * every, 5 * every + 2 * every + 1):
        ahead = done + window + 1
        generator = [s for s in range(every, ahead + 1) if s % every == 0][-keep:]
        # The token of `done` is out, the checkpoint of `done` is not yet.
        discriminator = [s for s in range(every, done) if s % every == 0][-keep:]
        if damaged:
            discriminator = discriminator[:-1]
        assert set(generator) & set(discriminator)


def test_the_runs_folder_is_named_after_its_flagfile(monkeypatch):
    for arguments in (["--flagfile=a/b.flags"], ["--flagfile", "a/b.flags"]):
        line = "--flagfile=wan_60mbit.flags"
        monkeypatch.setattr("sys.argv", ["x.py", *arguments, line, "--steps=3"])
        assert str(shared_flags.workdir()) == "runs/b"


AGREED = {"--steps": 9}


def save(own, name="source"):
    """A checkpoint of step 1 in the run's folder."""
    checkpoints = saved.Saved(name, AGREED, own=own)
    checkpoints.save(1, {"a": jnp.ones(3)})
    return checkpoints


def test_what_a_cluster_itself_had_must_be_as_it_was(tmp_path):
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        save({"text": "abc", "model": "def"})
        saved.Saved("source", AGREED, own={"text": "abc", "model": "def"})
        saved.check_same_run("source", AGREED, {"model": "def"})
        saved.check_same_run("source", AGREED)
        words = "holds a run with text=abc, this one has xyz; name another --workdir"
        with pytest.raises(checkpoint.CheckpointError, match=words):
            saved.Saved("source", AGREED, own={"text": "xyz"})


def test_what_is_learned_of_the_peer_must_be_as_it_was(tmp_path):
    peer = {"the peer's text": "abc"}
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        checkpoints = saved.Saved("source", AGREED)
        checkpoints.add_own(**peer)
        checkpoints.save(1, {"a": jnp.ones(3)})
        again = saved.Saved("source", AGREED)
        again.add_own(**peer)
        with pytest.raises(checkpoint.CheckpointError, match="the peer's text=abc"):
            again.add_own(**{"the peer's text": "xyz"})


def test_files_of_another_cluster_are_not_ones_own(tmp_path):
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        save({}, "target")
        (tmp_path / "target").rename(tmp_path / "source")
        with pytest.raises(checkpoint.CheckpointError, match="cluster=target, this"):
            saved.check_same_run("source", AGREED)


def test_checkpoints_of_before_these_were_saved_can_be_used(tmp_path, monkeypatch):
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        checkpoints = saved.Saved("source", AGREED)
        folder = tmp_path / "source" / "checkpoints"
        checkpoint.save(folder, 1, {"a": jnp.ones(3)}, {"settings": AGREED}, 3)
        checkpoints = saved.Saved("source", AGREED, own={"text": "abc"})
        assert checkpoints.steps == [1]


def test_a_state_goes_into_a_checkpoint_with_its_codecs_and_comes_back(tmp_path):
    mesh = mesh_lib.make_mesh(jax.devices()[:1], 1)
    start = {"w": jnp.arange(3.0)}
    placed = mesh_lib.sharded_init_from_arrays(mesh, lambda: start)
    assert placed.init()["w"] is not start["w"]  # a step may use it up
    codecs = [{"rest": jnp.zeros(2)}, ()]
    both = mesh_lib.sharded_init_with_codecs(placed, mesh, codecs)
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        checkpoints = saved.Saved("source", AGREED)
        fresh, position = checkpoints.restore(0, both)
        assert position is None
        moved = jax.tree.map(lambda leaf: leaf + 1, fresh)
        checkpoints.save(4, moved, position=7)
        restored, position = saved.Saved("source", AGREED).restore(4, both)
    assert position == 7
    jax.tree.map(np.testing.assert_array_equal, restored, moved)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
