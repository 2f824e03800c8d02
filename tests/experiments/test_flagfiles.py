import pathlib

import configured
import jax.numpy as jnp
import pytest

from experiments import pretrain_m3
from experiments.abnet import config as abnet_config
from experiments.abnet import models as abnet_models
from experiments.bert import config as bert_config
from experiments.m3 import config as m3_config
from experiments.xnli import config as xnli_config
from nebula_jax.communication import wan
from nebula_jax.data import language_mixture, text_folder
from nebula_jax.models import transformer
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.training import m3

FOLDER = pathlib.Path(pretrain_m3.__file__).parent / "flags"


CONFIGS = {"m3": m3_config, "abnet": abnet_config, "bert": bert_config}
CONFIGS |= {"xnli": xnli_config}
NAMES = {"m3": ["discriminator", "generator:0"], "abnet": ["target", "source"]}


@pytest.mark.parametrize(
    "path",
    # Of distill its own tests read it.
    sorted(set(FOLDER.iterdir()) - {*FOLDER.glob("wan_*"), *FOLDER.glob("distill_*")}),
    ids=lambda p: p.stem,
)
def test_every_flagfile_is_a_possible_run(path):
    name = path.stem.partition("_")[0]
    run = configured.run(CONFIGS[name], f"--flagfile={path}", "--data_dir=text")
    if not getattr(run.local, "hot_start", ""):  # else its checkpoint must be there
        CONFIGS[name].check(run)
    if name in NAMES:
        connection = run.local.connection()
        all_clusters.check_place(connection, run.local.cluster, NAMES[name])
    if name == "m3":
        groups = [["en", "de"]] * 3
        if not run.agreed.generators.isdecimal():
            groups = run.agreed.groups()
        language_mixture.parse_tasks(run.agreed.task_mix, groups)


@pytest.mark.parametrize(("name", "rate"), [("60mbit", 60e6), ("170mbit", 170e6)])
def test_a_line_is_a_flagfile_to_add(name, rate):
    files = (FOLDER / "m3_quickstart.flags", FOLDER / f"wan_{name}.flags")
    run = configured.run(m3_config, *(f"--flagfile={path}" for path in files))
    lines = wan.from_string(run.local.wan)
    assert lines == wan.Lines(wan.Line(rate, 0.015), wan.Line(rate, 0.015))
    assert run.agreed.steps == 1200


# Section 4.1; section 4.2 and, where it leaves it open, ABNet's code; ERNIE-M's recipe.
PAPER = {
    "m3": {
        **{"generator_size": "base", "discriminator_size": "large"},
        **{"vocab_size": 250_002, "max_length": 512, "batch_size": 2048},
        **{"learning_rate": 1e-4, "warmup_steps": 10_000},
        **{"rtd_weight": 50, "clm_weight": 1},
    },
    "abnet": {
        **{"objective": "cmlm", "encoder_adapter_dim": 512, "batch_size": 128},
        **{"length_buckets": (64,), "warmup_steps": 4000, "learning_rate": 5e-4},
        **{"label_smoothing": 0.1, "beams": 4, "iterations": 10},
    },
    "xnli": {
        **{"learning_rate": 5e-5, "layer_decay": 0.8, "warmup_ratio": 0.1},
        **{"epochs": 5, "batch_size": 32, "checkpoint_selection": "best"},
        "length_buckets": (32, 48, 64, 96, 128, 192, 256),
        "languages": text_folder.LANGUAGES,
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_flagfiles_have_the_papers_values(name):
    path = FOLDER / f"{name}_paper.flags"
    run = configured.run(CONFIGS[name], f"--flagfile={path}")
    found = vars(run.agreed) | vars(run.local)
    assert {key: found[key] for key in PAPER[name]} == PAPER[name]


def test_what_no_flagfile_names_has_the_papers_values_too():
    """λ and γ of eq. 11, as the flags have them and as the library does."""
    agreed = configured.run(m3_config).agreed
    assert (agreed.rtd_weight, agreed.clm_weight) == (50, 1)
    shape = transformer.config_of_size("nano", vocab_size=9, max_length=8)
    library = m3.Config(shape, shape, steps=1)
    assert (library.rtd_weight, library.clm_weight) == (50, 1)
    agreed = configured.run(m3_config, rtd_weight=7, clm_weight=3).agreed
    made = m3_config.model(agreed, shape, shape)
    assert (made.rtd_weight, made.clm_weight) == (7, 3)


def test_translators_train_by_abnets_moments():
    optimizer = abnet_models.make_optimizer(configured.run(abnet_config).agreed)
    params = {"w": jnp.zeros(1)}
    _, state = optimizer.update({"w": jnp.ones(1)}, optimizer.init(params), params)
    (adam,) = [each for each in state if hasattr(each, "mu")]
    assert float(adam.mu["w"][0]) == pytest.approx(1 - 0.9)
    assert float(adam.nu["w"][0]) == pytest.approx(1 - 0.98)
