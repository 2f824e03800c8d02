import pathlib

import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import pretrain_m3, shared_flags
from experiments.abnet import config as abnet_config
from experiments.abnet import models as abnet_models
from experiments.abnet import scaled_wan
from experiments.m3 import config as m3_config
from nebula_jax.communication import wan
from nebula_jax.data import language_mixture
from nebula_jax.models import transformer
from nebula_jax.runtime import connect

FOLDER = pathlib.Path(pretrain_m3.__file__).parent / "flags"


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("m3_*.flags")), ids=lambda p: p.stem
)
def test_every_flagfile_is_a_possible_run(path):
    flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        flags.FLAGS(["test", f"--flagfile={path}"])
        shared_flags.check_shared_flags("discriminator", "generator")
        groups = [["en", "de"]] * 3
        if not m3_config.GENERATORS.value.isdigit():
            groups = language_mixture.parse_groups(m3_config.GENERATORS.value)
        language_mixture.parse_tasks(m3_config.TASKS.value, groups)


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("abnet_*.flags")), ids=lambda p: p.stem
)
def test_every_translation_is_a_possible_run(path):
    run = abnet_run(path)
    connection = scaled_wan.without(run.local).connection()
    connect.check_role(connection, run.local.cluster, "target", "source")
    scaled_wan.check(run.local)
    abnet_config.check(run)


def abnet_run(path):
    """The configuration that a flagfile of train_abnet makes."""
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(**abnet_config.DEFAULTS):
        flags.FLAGS(["test", f"--flagfile={path}"])
        return abnet_config.from_flags()


@pytest.mark.parametrize(("name", "rate"), [("60mbit", 60e6), ("170mbit", 170e6)])
def test_a_line_is_a_flagfile_to_add(name, rate):
    flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        files = (FOLDER / "m3_quickstart.flags", FOLDER / f"wan_{name}.flags")
        flags.FLAGS(["test", *(f"--flagfile={path}" for path in files)])
        lines = wan.from_string(shared_flags.WAN.value)
        assert lines == wan.Lines(wan.Line(rate, 0.015), wan.Line(rate, 0.015))
        assert shared_flags.STEPS.value == 1200


def test_the_papers_flagfile_has_the_papers_values():
    """Section 4.1."""
    flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        flags.FLAGS(["test", f"--flagfile={FOLDER / 'm3_paper.flags'}"])
        assert transformer.SIZES[m3_config.GENERATOR_SIZE.value][:2] == (12, 768)
        assert transformer.SIZES[m3_config.DISCRIMINATOR_SIZE.value][:2] == (24, 1024)
        assert m3_config.VOCAB_SIZE.value == 250_002
        assert m3_config.MAX_LENGTH.value == 512
        assert shared_flags.BATCH_SIZE.value == 2048
        assert m3_config.LEARNING_RATE.value == 1e-4
        assert m3_config.WARMUP_STEPS.value == 10_000
        assert m3_config.RTD_WEIGHT.value == 50
        assert m3_config.CLM_WEIGHT.value == 1


def test_the_papers_translation_has_the_papers_values():
    """Section 4.2; what it leaves open is ABNet's code's."""
    agreed = abnet_run(FOLDER / "abnet_paper.flags").agreed
    assert agreed.objective == "cmlm"
    assert agreed.encoder_adapter_dim == 512
    assert (agreed.batch_size, agreed.length_buckets) == (128, (64,))
    assert (agreed.warmup_steps, agreed.learning_rate) == (4000, 5e-4)
    assert agreed.label_smoothing == 0.1
    assert (agreed.beams, agreed.iterations) == (4, 10)
    optimizer = abnet_models.make_optimizer(agreed)
    params = {"w": jnp.zeros(1)}
    _, state = optimizer.update({"w": jnp.ones(1)}, optimizer.init(params), params)
    (adam,) = [each for each in state if hasattr(each, "mu")]
    assert float(adam.mu["w"][0]) == pytest.approx(1 - 0.9)
    assert float(adam.nu["w"][0]) == pytest.approx(1 - 0.98)
