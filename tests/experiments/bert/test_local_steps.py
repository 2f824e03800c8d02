"""The settings of local steps: their defaults, and what cannot be."""

import configured
import pytest
from absl import flags

from experiments.bert import config, local_steps
from nebula_jax import errors
from nebula_jax.commands import command_line
from nebula_jax.training import diloco

CLUSTERS = ["cluster:0", "cluster:1"]


def settings(**given):
    """The settings of a run that has such flags."""
    return configured.run(config, **given).agreed


def check(made, clusters):
    local_steps.check(made, clusters)


def config_of(made):
    return made.rounds().config(made.fragments)


def test_streaming_is_the_papers_outer_step():
    """2501.18512: Nesterov with 0.7 and 0.9, alpha 0.5, 4-bit floats."""
    made = settings(inner_steps=30, fragments=3, delay=2)
    assert config_of(made) == diloco.Config(
        inner_steps=30, fragments=3, delay=2, learning_rate=0.7, momentum=None
    )
    assert made.rounds().codec == "e3m0(256)"
    assert config_of(made).outer_momentum == 0.9
    assert config_of(settings()).mixing == 0.5  # without a delay too
    assert config_of(settings(inner_steps=23)).outer_momentum == 0
    assert config_of(settings(inner_steps=24)).outer_momentum == diloco.MOMENTUM
    assert config_of(settings(inner_steps=23, outer_momentum=0.8)).momentum == 0.8
    assert config_of(settings(inner_steps=30, outer_momentum=0)).momentum == 0


def test_the_defaults_can_be():
    check(settings(), CLUSTERS)
    check(settings(sync="allreduce"), CLUSTERS[:1])
    check(settings(hub="1", quorum=1, grace=0.5), CLUSTERS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync": "allreduce"}, "--sync=allreduce is for one cluster, and there are 2"),
        ({"delay": 100}, r"--delay must be below the 100 steps .* not 100"),
        ({"inner_steps": 10, "fragments": 3, "delay": 3}, "delay must be below the 3"),
        ({"inner_steps": 2, "fragments": 3}, "--fragments must be from 1 to"),
        ({"mixing": 1.0}, r"--mixing must be in \[0, 1\), not 1.0"),
        ({"delta_codec": "e3m1"}, "unknown codec e3m1"),
        ({"delta_codec": "pack_tokens|int8(64)"}, "chooses among codecs"),
        ({"hub": "2"}, "--hub=cluster:2: the clusters are cluster:0"),
        ({"hub": "berlin"}, "--hub=berlin: the clusters are cluster:0"),
        ({"quorum": 1}, "--quorum=1: needs a hub"),
        ({"quorum": 3, "hub": "0"}, "--quorum=3: .* at most 2 clusters"),
        ({"grace": 1.0, "hub": "0"}, "--grace=1.0: is for rounds with a quorum"),
    ],
)
def test_what_cannot_be_is_named_with_what_would_do(given, message):
    made = settings(**given)
    with pytest.raises(errors.NebulaError, match=message):
        command_line.with_flags(lambda: check(made, CLUSTERS))


@pytest.mark.parametrize(
    "flag", ["--outer_momentum=-0.5", "--outer_momentum=1", "--outer_learning_rate=0"]
)
def test_an_outer_step_that_cannot_be_is_no_flag(flag):
    with pytest.raises(flags.Error, match=flag):
        configured.run(config, flag)


def test_one_flagfile_serves_allreduce_too():
    """With one flag between them: what is of local steps alone is not used."""
    other = {
        "inner_steps": 7, "fragments": 2, "delay": 1, "delta_codec": "fp16",
        "mixing": 0.1, "outer_momentum": 0.0,
    }  # fmt: skip
    check(settings(sync="allreduce", clusters=1, **other), CLUSTERS[:1])
