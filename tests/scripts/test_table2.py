import pathlib

import tiny_tables

from scripts import table2_bleu
from scripts.tables import runs as table_runs

BASE = ("--flagfile=f.flags",)
METHODS = list(table2_bleu.FLAGS)


def run(method, seed="0", pair="es-en"):
    return table2_bleu.run_of(BASE, method, pair, seed)


def result(bleu):
    return {
        "held_out": None,
        "summary": {
            "commit": "abc123",
            "seconds": 60.0,
            "bleu": [{"step": 2, "dev": bleu - 1, "test": bleu}],
            "clusters": [{"trained_parameters": n} for n in (400_000, 500_000)],
        },
    }


def test_what_the_methods_differ_in():
    masked, whole, cloud = (run(method).arguments for method in METHODS)
    assert "--cluster=whole" in whole
    assert {*masked} - {*whole} == {"--objective=cmlm", "--beams=4"}
    assert "--cluster=all" in cloud
    assert len({run(method, seed).name for method in METHODS for seed in "01"}) == 6


def test_rows_gather_seeds_pairs_and_clusters():
    ended = {
        run(method, seed, pair).name: result(9.0)
        for method in METHODS
        for pair in table2_bleu.PAIRS
        for seed in "01"
    }
    for seed, score in (("0", 30.0), ("1", 32.0)):
        ended[run(table2_bleu.CLOUD, seed).name] = result(score)

    class Ended(table_runs.Runs):
        def result(self, run):
            return ended[run.name]

    table = tiny_tables.table(scale="tiny")
    rows = table2_bleu.record(Ended(pathlib.Path("table"), None), table)["rows"]
    assert [row["method"] for row in rows] == METHODS
    cloud = rows[METHODS.index(table2_bleu.CLOUD)]
    assert cloud["pairs"] == [
        {"pair": "es-en", "bleu": [30.0, 32.0]},
        {"pair": "zh-en", "bleu": [9.0, 9.0]},
    ]
    assert cloud["trained_parameters"] == 900_000
    assert cloud["seconds"] == 240
