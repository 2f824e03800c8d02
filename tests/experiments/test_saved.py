import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import clusters, saved
from nebula_jax.training import checkpoint


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(checkpoint_every=100, window=2):
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
        assert str(clusters.workdir()) == "runs/b"
