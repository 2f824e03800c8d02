"""One finished run for the notebooks, made by the real command."""

import pathlib
import sys

import pytest
import tiny_runs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "notebooks"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The folder of a run of 4 steps with two checkpoints, and its text beside it."""
    runs = tiny_runs.Runs(tmp_path_factory.mktemp("notebooks"))
    less = {"task_mix": "mrtd", "dropout": 0.0}  # to compile; notebooks see neither
    less |= {"discriminator_layers": 2, "cluster": "whole"}  # to be cut between
    runs.finished(steps=4, checkpoint_every=2, workdir="runs/tiny", **less)
    return runs.folder / "runs" / "tiny"
