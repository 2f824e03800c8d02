import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import shared_flags  # noqa: F401  (defines --out and others)
from nebula_jax import errors
from scripts.tables import config


def test_the_text_is_the_given_folder_else_the_one_beside_the_repository(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "BESIDE", tmp_path / "shared" / "data")
    assert config.data_dir("given") == "given"
    with pytest.raises(errors.SettingsError, match="--data_dir is missing"):
        config.data_dir("package:django")
    config.BESIDE.mkdir(parents=True)
    assert config.data_dir("package:django") == str(pathlib.Path("shared", "data"))


def test_scale_and_seeds_are_what_they_say():
    for given, want in (
        ("", ("0", "1", "2")),
        ("2", ("0", "1")),
        ("0,7", ("0", "7")),
        ("5,", ("5",)),
        ("00,", ("0",)),
        ("07, 4294967295", ("7", "4294967295")),
    ):
        assert config.seed_list(given, 3) == want
    refused = ("x", "0", "1,1", "-1", "0,00", "101", "\u0663", "1,\u0663", "9" * 5000)
    for given in refused:
        with pytest.raises(errors.SettingsError, match="--seeds"):
            config.seed_list(given, 3)
    assert config.scale("", ["small", "large"]) == "small"
    with pytest.raises(errors.SettingsError, match="there is small here"):
        config.scale("huge", ["small"])


def test_a_table_is_named_after_its_scale():
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(data_dir="text", scale="", seeds="3,4"):
        one, scaled = config.from_flags("a"), config.from_flags("a", ["tiny"])
        with flagsaver.flagsaver(results_dir="kept"):
            assert config.from_flags("a").results == pathlib.Path("kept")
    assert (one.name, one.workdir) == ("a", pathlib.Path("runs/a"))
    assert (scaled.name, scaled.workdir) == ("a_tiny", pathlib.Path("runs/a_tiny"))
    assert scaled.results == pathlib.Path("runs/a_tiny/results")
    assert scaled.out == config.FOLDER / "results" / "a_tiny.json"
    assert scaled.seeds == ("3", "4")
    flagfile = pathlib.Path("x.flags")
    assert scaled.arguments(flagfile)[:2] == ("--flagfile=x.flags", "--data_dir=text")
