"""The configuration of a BERT run: names, and what cannot be."""

import configured
import pytest

from experiments.bert import config
from nebula_jax import errors
from nebula_jax.models import transformer


def run(**given):
    return configured.run(config, **given)


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


def test_the_warm_up_is_a_share_of_the_run():
    shape = transformer.config_of_size("nano", vocab_size=9, max_length=8)
    made = config.model(run(steps=200, warmup_steps=50).agreed, shape)
    assert (made.warmup, made.steps) == (0.25, 200)
    assert config.model(run(steps=10, warmup_steps=50).agreed, shape).warmup == 1


def test_the_model_has_what_the_flags_name():
    shape = transformer.config_of_size("nano", vocab_size=9, max_length=8)
    given = {"all_reduce": "once", "seed": 3}
    given |= {"optimizer": "muon", "mask_rate": 0.3, "weight_decay": 0.02}
    made = config.model(run(**given).agreed, shape)
    assert (made.encoder, made.trains) == (shape, "all")
    assert made.all_reduce == "once"
    assert (made.optimizer, made.mask_rate, made.weight_decay) == ("muon", 0.3, 0.02)
    made = config.model(run(trains="adapters_and_head").agreed, shape)
    assert made.trains == "adapters_and_head"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clusters": 0}, "--clusters=0: expected 1 to 8"),
        ({"clusters": 9}, "--clusters=9: expected 1 to 8"),
        (
            {"all_reduce": "once", "pipeline": 2, "devices_per_cluster": 2},
            "--pipeline=2 needs --fsdp=S: its stages are the devices of a group",
        ),
        (
            {
                **{"trains": "adapters_and_head", "pipeline": 2},
                **{"fsdp": 2, "devices_per_cluster": 2},
            },
            "--pipeline=2 is not for --trains=adapters_and_head",
        ),
        ({"head_priors": True}, "--head_priors counts in the steps"),
        ({"clusters": 1}, "--sync=streaming is for several clusters"),
        ({"languages": "en|de|sw"}, "has 3 groups: give one, for every cluster, or"),
        ({"languages": "en|../sw"}, "languages: '../sw' is no language"),
        ({"emulate_compute": "5,6"}, "--emulate_compute=5,6: expected one number"),
        ({"micro_batches": 3}, "micro_batches=3 does not divide batch_size=16"),
        ({"hub": "0", "quorum": 1, "processes_per_cluster": 2}, "--quorum=1 is for"),
        ({"devices_per_cluster": 2, "eval_batch_size": 5}, "size=5 cannot be split"),
    ],
)
def test_what_cannot_be_is_named(given, message):
    with pytest.raises(errors.NebulaError, match=message.replace("|", r"\|")):
        config.check(run(**given))
