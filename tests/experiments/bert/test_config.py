"""The configuration of a BERT run: names, times, and what cannot be."""

import dataclasses
import json

import configured
import pytest

from experiments import configuration
from experiments.bert import config
from nebula_jax import errors
from nebula_jax.models import transformer


def run(**given):
    return configured.run(config, **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"clusters": 1, "sync": "allreduce", "total_time": "2h"},
        {"clusters": 3, "batch_sizes": "8,16,8", "languages": "en de|hi|ur"},
        {"cluster": "1", "hub": "0", "quorum": 1, "delta_codec": "int8(64)|zstd(3)"},
        {"emulate_compute": 50, "languages": "en,de", "cluster": "whole"},
    ],
)
def test_a_possible_run_comes_back_from_its_arguments(given):
    first = run(**given)
    config.check(first)
    assert configured.run(config, *configuration.arguments(first)) == first
    json.dumps(configuration.settings(first.agreed))


def test_a_cluster_has_a_number_and_a_name():
    for given in ("1", "cluster:1"):
        found = run(cluster=given, hub=given)
        assert found.local.cluster == found.agreed.hub == config.name_of(1)
        assert config.index_of(found.agreed, found.local.cluster) == 1
    assert config.names(found.agreed) == ["cluster:0", "cluster:1"]
    assert run(cluster="all").local.cluster == "all"
    for name in ("cluster:2", "cluster:01", "cluster:²", "generator:0", "2"):
        with pytest.raises(errors.SettingsError, match="or one of 0, 1"):
            config.check(run(cluster=name))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1193h", 1193 * 3600)],
)
def test_a_total_time_is_in_seconds(text, seconds):
    assert run(total_time=text).agreed.seconds() == seconds


def test_a_total_time_that_cannot_be_read_or_that_no_message_can_have():
    bad = "30", "m", "0s", "1d", "-1s", "1e3s", "30 m", "1h30m"
    wanted = dict.fromkeys(bad, "such as 90s, 30m or 2h")
    wanted |= dict.fromkeys(("1194h", "4294968s", "999999999m"), "at most 1193h")
    for text, words in wanted.items():
        with pytest.raises(errors.SettingsError, match=words):
            config.check(run(total_time=text))


def test_the_warm_up_is_a_share_of_the_run_by_steps_or_by_time():
    shape = transformer.config_of_size("nano", vocab_size=9, max_length=8)
    given = {"steps": 200, "warmup_steps": 50, "warmup_ratio": 0.1}
    by_steps = config.model(run(**given).agreed, shape)
    assert (by_steps.warmup, by_steps.by_time, by_steps.steps) == (0.25, False, 200)
    by_time = config.model(run(**given, total_time="5m").agreed, shape)
    assert (by_time.warmup, by_time.by_time) == (0.1, True)
    assert config.model(run(steps=10, warmup_steps=50).agreed, shape).warmup == 1


def test_the_model_has_what_the_flags_name():
    shape = transformer.config_of_size("nano", vocab_size=9, max_length=8)
    given = {"logits": "all", "layout": "joined", "all_reduce": "once", "seed": 3}
    given |= {"optimizer": "lamb", "mask_rate": 0.3, "weight_decay": 0.02}
    made = config.model(run(**given, adapter_dim=8).agreed, shape)
    assert (made.encoder, made.adapter_dim, made.trains) == (shape, 0, "all")
    assert (made.logits, made.layout, made.all_reduce) == ("all", "joined", "once")
    assert (made.optimizer, made.mask_rate, made.weight_decay) == ("lamb", 0.3, 0.02)
    made = config.model(run(trains="adapters", adapter_dim=8).agreed, shape)
    assert (made.adapter_dim, made.trains) == (8, "adapters")


def test_clusters_have_as_many_rows_as_they_are_given():
    assert run(clusters=3, batch_size=8).agreed.rows() == (8, 8, 8)
    assert run(batch_sizes="8,24").agreed.rows() == (8, 24)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clusters": "two"}, "--clusters=two: expected one number such as 2"),
        ({"clusters": "1,2"}, "--clusters=1,2: expected one number such as 2"),
        ({"clusters": 0}, "--clusters=0: expected 1 to 8"),
        ({"clusters": 9}, "--clusters=9: expected 1 to 8"),
        (
            {"all_reduce": "once", "pipeline": 2, "devices_per_cluster": 2},
            "--pipeline=2 needs --fsdp=S: its stages are the devices of a group",
        ),
        (
            {"trains": "adapters", "pipeline": 2, "fsdp": 2, "devices_per_cluster": 2},
            "--pipeline=2 is not for --trains=adapters",
        ),
        (
            {"trains": "adapters", "head_warmup_steps": 5},
            "--trains=adapters has no head that trains",
        ),
        (
            {"total_time": "2h", "head_warmup_steps": 5},
            "--total_time=2h is not for a warm start of heads",
        ),
        ({"head_priors": True}, "--head_priors counts in the steps"),
        ({"clusters": 1}, "--sync=streaming is for several clusters"),
        ({"batch_sizes": "8"}, "--batch_sizes=8: expected 2 numbers above 0"),
        ({"batch_sizes": "8,0"}, "--batch_sizes=8,0: expected 2 numbers above 0"),
        ({"languages": "en|de|sw"}, "has 3 groups: give one, for every cluster, or"),
        ({"languages": "en|../sw"}, "languages: '../sw' is no language"),
        ({"languages": "en|en"}, "languages=\"en|en\": 'en' comes twice"),
        ({"languages": "en|"}, "a cluster without languages"),
        ({"emulate_compute": "5,6"}, "--emulate_compute=5,6: expected one number"),
        ({"micro_batches": 3}, "micro_batches=3 does not divide batch_size=16"),
        (
            {"batch_sizes": "9,8", "micro_batches": 3},
            "micro_batches=3 does not divide batch_size=8",
        ),
        (
            {"hub": "0", "quorum": 1, "processes_per_cluster": 2},
            "--quorum=1 is for clusters of one process each",
        ),
        (
            {"devices_per_cluster": 2, "eval_batch_size": 5},
            "--eval_batch_size=5 cannot be split evenly over 2 devices",
        ),
    ],
)
def test_what_cannot_be_is_named(given, message):
    with pytest.raises(errors.NebulaError, match=message.replace("|", r"\|")):
        config.check(run(**given))


def test_a_cluster_is_checked_for_its_own_rows_alone():
    given = {"batch_sizes": "9,8", "micro_batches": 3}
    config.check(run(cluster="0", **given))
    with pytest.raises(errors.SettingsError, match="does not divide"):
        config.check(run(cluster="1", **given))


def test_every_shared_setting_is_compared_when_clusters_meet():
    agreed = run().agreed
    names = {f"--{each.name}" for each in dataclasses.fields(agreed)}
    assert set(configuration.settings(agreed)) == names
    assert {"--sync", "--inner_steps", "--languages", "--hub", "--max_length"} <= names


def test_a_share_of_the_time_is_for_runs_by_time():
    """By steps it would count for nothing, and the rate might never fall."""
    config.check(run(warmup_ratio=0.06, total_time="30m"))
    with pytest.raises(errors.SettingsError, match=r"ratio=0.* is for --total_time"):
        config.check(run(warmup_ratio=0.06, steps=1000))
