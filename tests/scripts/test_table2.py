import pathlib

import configured
import held_out_scores
import pytest
import tiny_translations

from experiments.abnet import config as abnet_config
from experiments.abnet import models as abnet_models
from nebula_jax.evaluation import sentence_scores
from scripts import table2_bleu
from scripts.tables import runs as table_runs

BASE = ("--flagfile=f.flags",)
SCORES = held_out_scores.scores([True], nats=10.0)
METHODS = list(table2_bleu.FLAGS)


def run(method, seed="0", pair="es-en"):
    return table2_bleu.run_of(BASE, method, pair, seed)


def gather(ended, pairs=("es-en",), seeds="01"):
    """The rows of runs: name -> figures."""

    class Ended(table_runs.Runs):
        def found(self, run):
            return ended[run.name]

    runs = Ended(pathlib.Path("table"), None)
    return table2_bleu.gather(
        runs, lambda method, pair, seed: run(method, seed, pair), pairs, seeds
    )


def result(bleu, parameters=(1_000_000,), commit="abc123", scores=None):
    return {
        "held_out": scores and sentence_scores.dumps(scores),
        "summary": {
            "commit": commit,
            "seconds": 60.0,
            "bleu": [{"step": 2, "dev": bleu - 1, "test": bleu}],
            "clusters": [{"trained_parameters": count} for count in parameters],
        },
    }


def test_what_the_methods_differ_in():
    masked, whole, cloud = (run(method).arguments for method in METHODS)
    assert "--cluster=whole" in whole
    assert {*masked} - {*whole} == {"--objective=cmlm", "--beams=4"}
    assert "--cluster=all" in cloud
    assert len({run(method, seed).name for method in METHODS for seed in "01"}) == 6


def test_rows_gather_seeds_pairs_and_clusters():
    plain = {run(method, seed).name: result(9.0) for method in METHODS for seed in "01"}
    rows = gather(
        plain
        | {
            run(table2_bleu.MASKED, "0").name: result(3.0, scores=SCORES),
            run(table2_bleu.CLOUD, "0").name: result(30.0, (400_000, 500_000)),
            run(table2_bleu.CLOUD, "1").name: result(32.0, (400_000, 500_000)),
        }
    )
    assert [row["method"] for row in rows] == METHODS
    cloud = rows[METHODS.index(table2_bleu.CLOUD)]
    assert cloud["pairs"] == [{"pair": "es-en", "bleu": [30.0, 32.0]}]
    assert cloud["trained_parameters"] == 900_000
    assert cloud["seconds"] == 120


def test_rows_of_each_pair_are_beside_abnet_on_its_held_out_sentences():
    """Mask-predict's loss is of other predictions, so only its BLEU is compared."""
    quality = {
        table2_bleu.MASKED: ([True, True, False, False], 6.0, 3),
        table2_bleu.ABNET: ([True, True, True, False], 10.0, 5),
        table2_bleu.CLOUD: ([True, True, True, True], 9.0, 5),
    }
    ended = {
        run(method, seed, pair).name: result(
            9.0, scores=held_out_scores.scores(*quality[method])
        )
        for pair in ("es-en", "zh-en")
        for seed in "012"
        for method in METHODS
    }
    rows = gather(ended, ("es-en", "zh-en"), "012")
    found = {
        (row["method"], each["pair"]): each["held_out"]
        for row in rows
        for each in row["pairs"]
    }
    for pair in ("es-en", "zh-en"):
        assert "difference" not in found[table2_bleu.ABNET, pair]
        assert "difference" not in found[table2_bleu.MASKED, pair]
        assert found[table2_bleu.MASKED, pair]["bleu_difference"]["difference"] < 0
        assert found[table2_bleu.CLOUD, pair]["difference"] == pytest.approx(
            dict.fromkeys("012", -0.2)
        )
        assert found[table2_bleu.ABNET, pair]["loss"] == dict.fromkeys("012", 2.0)


def test_a_flagfile_is_read_as_settings(tmp_path):
    path = tmp_path / "a.flags"
    path.write_text("# one\n--steps=3\n\n--truncate\n--forward_codec=a=b\n")
    want = {"steps": "3", "truncate": "true", "forward_codec": "a=b"}
    assert table_runs.settings(path) == want
    before = table_runs.digest((f"--flagfile={path}", "--steps=4"))
    path.write_text(path.read_text() + "# a comment changes nothing\n")
    assert table_runs.digest((f"--flagfile={path}",)) == before


def test_the_flags_of_the_rows_train_everything_or_use_the_first_layers(tmp_path):
    folder = tiny_translations.write_model(tmp_path / "model", 16, seed=0)
    path = "encoder/layer_0/output/kernel"
    run = configured.run(abnet_config, length_buckets="8")
    assert abnet_models.load(run, folder).model.config.layers == 2
    one = abnet_models.load(run, folder, layers=1)
    assert one.model.config.layers == len(one.model.params["encoder"]) == 1
    assert one.digest != abnet_models.load(run, folder).digest
    assert not one.is_trained(path)
    everything = configured.run(abnet_config, train_all="true", length_buckets="8")
    assert abnet_models.load(everything, folder, new_head=True).is_trained(path)
