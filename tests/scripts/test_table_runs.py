import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import clusters
from scripts import table_runs


def test_the_text_is_the_given_folder_else_the_one_beside_the_repository(
    tmp_path, monkeypatch
):
    flags.FLAGS(["test"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table_runs, "BESIDE", tmp_path / "shared" / "data")
    with flagsaver.flagsaver(data_dir="given"):
        assert table_runs.data_dir() == "given"
    with pytest.raises(clusters.FlagError, match="--data_dir is missing"):
        table_runs.data_dir()
    table_runs.BESIDE.mkdir(parents=True)
    assert table_runs.data_dir() == str(pathlib.Path("shared", "data"))
