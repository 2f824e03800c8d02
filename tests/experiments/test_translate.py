"""Which checkpoint a run is translated with."""

import pytest

from experiments.abnet import translator
from nebula_jax import errors
from nebula_jax.training import checkpoint, checkpoint_files


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Makes folders with checkpoints that name themselves."""
    steps_of = {}

    def save(**steps):
        for name, steps_of[tmp_path / name / "checkpoints"] in steps.items():
            (tmp_path / name / "checkpoints").mkdir(parents=True)
        return tmp_path

    def read(folder, step):
        name = folder.parent.name
        sides = ["source", "target"] if name == "whole" else [name]
        states = [{"state": {"params": f"{name}'s {side} {step}"}} for side in sides]
        return states if name == "whole" else states[0]

    monkeypatch.setattr(
        checkpoint_files, "verified_steps", lambda folder, log: steps_of[folder]
    )
    monkeypatch.setattr(checkpoint, "read", read)
    return save


def test_the_newest_step_is_taken_of_one_process_or_of_clusters(saved, capsys):
    folder = saved(whole=[2], source=[2, 4, 6], target=[2, 4])
    sides = ["source's source 4", "target's target 4"]
    assert translator.trained_params(folder) == (4, sides)
    assert "step 4 of source and target" in capsys.readouterr().err


def test_a_folder_without_checkpoints_says_so(saved):
    folder = saved(source=[2], target=[])
    with pytest.raises(errors.NebulaError, match=r".source has 2; target has n"):
        translator.trained_params(folder)
