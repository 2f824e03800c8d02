"""The settings that clusters compare: those of the flags, and digests."""

import dataclasses

import configured
import pytest
import tiny_hot_start

from experiments.m3 import config
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models.pretrained import folder as checkpoint_folder


@pytest.fixture
def vocabulary(tmp_path):
    lines = [f"the house has {n} doors" for n in range(200)]
    vocabularies.train(lines, 60, tmp_path / "v.model")
    return vocabularies.load(tmp_path / "v.model")


def test_a_hello_has_the_settings_that_checkpoints_hold(vocabulary):
    run = configured.run(config, cluster="generator:0")
    settings = config.settings(run, vocabulary)
    names = {f"--{each.name}" for each in dataclasses.fields(run.agreed)}
    assert settings.keys() == names | {"vocabulary"}
    assert {"--steps", "--seed", "--generators", "--fan_out", "--rtd_weight"} <= names
    assert settings["vocabulary"] == vocabulary.digest[:16]
    hello = run.hello(settings, [3, 5])
    assert (hello.cluster, hello.checkpoints) == ("generator:0", (3, 5))
    assert hello.settings == settings


def test_the_encoder_that_a_run_begins_with_is_compared_not_its_place(
    vocabulary, tmp_path
):
    places = [tiny_hot_start.write_model(tmp_path / name) for name in ("here", "there")]
    wanted = checkpoint_folder.digest(places[0])[:16]
    for place in places:
        run = configured.run(config, hot_start=place)
        assert config.settings(run, vocabulary)["--hot_start"] == wanted
