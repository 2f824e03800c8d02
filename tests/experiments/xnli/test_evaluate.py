"""Tests of what a run has trained."""

import pytest

from experiments.xnli import evaluate
from nebula_jax import errors


def test_predictions_do_not_lie_among_the_files_of_the_training(tmp_path):
    run = tmp_path / "run"
    for name in ("", "predictions", "finetune", "evaluated/../finetune/x"):
        with pytest.raises(errors.SettingsError, match="in the run's own folder"):
            evaluate._check_folder(run, str(run / name))
    for kept in ("", str(run / "evaluated" / "mine"), str(tmp_path / "elsewhere")):
        evaluate._check_folder(run, kept)
