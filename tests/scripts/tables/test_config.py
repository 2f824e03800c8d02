import pathlib

import pytest
import tiny_tables
from absl.testing import flagsaver

from experiments import shared_flags  # noqa: F401  (defines --out and others)
from nebula_jax import errors
from scripts.tables import abnet, config


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
    with flagsaver.flagsaver(data_dir="text", scale="", seeds="3,4"):
        one, scaled = config.from_flags("a"), config.from_flags("a", ["tiny"])
        with flagsaver.flagsaver(results_dir="kept"):
            assert config.from_flags("a").results == pathlib.Path("kept")
    assert (one.name, one.workdir) == ("a", pathlib.Path("runs/a"))
    assert (scaled.name, scaled.workdir) == ("a_tiny", pathlib.Path("runs/a_tiny"))
    assert scaled.out == config.FOLDER / "results" / "a_tiny.json"


def test_the_smallest_scale_has_a_seed_and_leaves_no_record_of_the_repository():
    with flagsaver.flagsaver(data_dir="text", scale="quick", seeds=""):
        made = config.from_flags("a", ["", "quick"], seeds=3)
        assert made.seeds == ("0",)
        assert made.out == pathlib.Path("runs/a_quick/a_quick.json")
        with flagsaver.flagsaver(scale=""):
            made = config.from_flags("a", ["", "quick"], seeds=3)
            assert (made.name, len(made.seeds)) == ("a", 3)
            assert made.out == config.FOLDER / "results" / "a.json"
        with (
            flagsaver.flagsaver(scale="huge"),
            pytest.raises(errors.SettingsError, match="huge: there is quick here"),
        ):
            config.from_flags("a", ["", "quick"])


def test_quick_settings_stand_in_the_place_of_the_flagfiles():
    settings, base = abnet.base_of(tiny_tables.table(scale="quick"))
    assert settings["steps"] == "32"
    assert base.index("--steps=32") > 0
    assert abnet.base_of(tiny_tables.table(scale="tiny"))[0]["steps"] == "160"
