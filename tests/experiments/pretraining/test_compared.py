"""The settings that clusters compare: those of the flags, and digests."""

import configured
import pytest
import tiny_hot_start

from experiments.m3 import config
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models.pretrained import folder as checkpoint_folder

SETTINGS = {
    "--steps": 1000, "--batch_size": 16, "--micro_batches": 1, "--seed": 0,
    "--checkpoint_every": 100, "--generators": "2", "--task_mix": "mrtd=1 trtd=1",
    "--window": 2, "--fan_out": 1, "--generator_size": "tiny",
    "--discriminator_size": "mini", "--generator_layers": 0,
    "--discriminator_layers": 0, "--max_length": 64, "--dtype": "float32",
    "--dropout": 0.1, "--mask_rate": 0.15, "--mask_policy": "electra",
    "--temperature": 1.0, "--rtd_weight": 50.0, "--clm_weight": 1.0,
    "--learning_rate": 1e-4, "--warmup_steps": 10_000, "--weight_decay": 0.0,
    "--clip_norm": 1.0, "--eval_every": 500, "--eval_batches": 2,
    "--head_warmup_steps": 0, "--head_learning_rate": 0.0, "--head_priors": False,
    "--layer_decay": 1.0, "--freeze_embeddings": False,
}  # fmt: skip
"""M3's, by default; a checkpoint that holds others is not gone on from."""


@pytest.fixture
def vocabulary(tmp_path):
    lines = [f"the house has {n} doors" for n in range(200)]
    vocabularies.train(lines, 60, tmp_path / "v.model")
    return vocabularies.load(tmp_path / "v.model")


def test_a_hello_has_the_settings_that_checkpoints_hold(vocabulary):
    run = configured.run(config, cluster="generator:0")
    settings = config.settings(run, vocabulary)
    assert settings == SETTINGS | {"vocabulary": vocabulary.digest[:16]}
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
