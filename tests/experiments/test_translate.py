"""Which checkpoint a run is translated with."""

import shutil

import pytest

from experiments.abnet import translator
from nebula_jax import errors
from nebula_jax.training import checkpoint, checkpoint_files


def test_the_newest_step_is_taken_of_one_process_or_of_clusters(
    tmp_path, monkeypatch, capsys
):
    steps_of = {"whole": [2], "source": [2, 4, 6], "target": [2, 4]}
    for name in steps_of:
        (tmp_path / name / "checkpoints").mkdir(parents=True)

    def read(folder, step):
        return {"state": {"params": f"{folder.parent.name} {step}"}}

    monkeypatch.setattr(
        checkpoint_files, "verified_steps", lambda at, log: steps_of[at.parent.name]
    )
    monkeypatch.setattr(checkpoint, "read", read)
    found = translator.trained_params(tmp_path)
    assert found == (4, ["source 4", "target 4"])
    assert "step 4 of source and target" in capsys.readouterr().err
    steps_of["target"] = []
    shutil.rmtree(tmp_path / "whole")
    with pytest.raises(errors.NebulaError, match=r".source has 2, 4, 6; target has n"):
        translator.trained_params(tmp_path)
