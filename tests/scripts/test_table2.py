import pathlib

import held_out_scores
import pytest
import tiny_tables

from nebula_jax.evaluation import sentence_scores
from scripts import table2_bleu
from scripts.tables import runs as table_runs

BASE = ("--flagfile=f.flags",)
SCORES = held_out_scores.scores([True], nats=10.0)
METHODS = list(table2_bleu.FLAGS)


def run(method, seed="0", pair="es-en"):
    return table2_bleu.run_of(BASE, method, pair, seed)


def rows_of(ended, seeds="01"):
    """The rows of runs: name -> figures."""

    class Ended(table_runs.Runs):
        def result(self, run):
            return ended[run.name]

    runs = Ended(pathlib.Path("table"), None)
    table = tiny_tables.table(scale="tiny", seeds=tuple(seeds))
    return table2_bleu.record(runs, table)["rows"]


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
    plain = {
        run(method, seed, pair).name: result(9.0, (400_000, 500_000))
        for method in METHODS
        for pair in table2_bleu.PAIRS
        for seed in "01"
    }
    rows = rows_of(
        plain
        | {
            run(table2_bleu.MASKED, "0").name: result(3.0, scores=SCORES),
            run(table2_bleu.CLOUD, "0").name: result(30.0),
            run(table2_bleu.CLOUD, "1").name: result(32.0),
        }
    )
    assert [row["method"] for row in rows] == METHODS
    cloud = rows[METHODS.index(table2_bleu.CLOUD)]
    assert cloud["pairs"] == [
        {"pair": "es-en", "bleu": [30.0, 32.0]},
        {"pair": "zh-en", "bleu": [9.0, 9.0]},
    ]
    assert cloud["trained_parameters"] == 900_000
    assert cloud["seconds"] == 240


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
        for pair in table2_bleu.PAIRS
        for seed in "012"
        for method in METHODS
    }
    rows = rows_of(ended, "012")
    found = {
        (row["method"], each["pair"]): each["held_out"]
        for row in rows
        for each in row["pairs"]
    }
    for pair in table2_bleu.PAIRS:
        assert "difference" not in found[table2_bleu.ABNET, pair]
        assert "difference" not in found[table2_bleu.MASKED, pair]
        assert found[table2_bleu.MASKED, pair]["bleu_difference"]["difference"] < 0
        assert found[table2_bleu.CLOUD, pair]["difference"] == pytest.approx(
            dict.fromkeys("012", -0.2)
        )
        assert found[table2_bleu.ABNET, pair]["loss"] == dict.fromkeys("012", 2.0)
