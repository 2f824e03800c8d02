import json
import pathlib
import shutil

import numpy as np
import pytest
import tiny_tables

from nebula_jax import errors
from scripts import table1_xnli
from scripts.tables import runs as table_runs
from scripts.tables import sweep, xnli_rows

LANGUAGES = sweep.PAPER["table1"]["languages"]
RIGHT = "1110110100"  # of ten test rows
ROWS = table1_xnli.ROWS
GAP = {"de": 0.12, "sw": 0.1}


class Stub:
    """Leaves behind what the real commands would; counts."""

    def __init__(self, fails_at="", is_cut_free=True):
        self.names, self._fails_at = [], fails_at
        self._is_cut_free = is_cut_free

    def __call__(self, run, workdir):
        if run.name == self._fails_at:
            raise KeyboardInterrupt
        self.names.append(run.name)
        summary = {"commit": "abc123", "seconds": 60.0}
        if run.module == xnli_rows.MODULE:
            summary |= _fine_tuned(run, workdir)
        else:
            encoder = workdir / run.makes.path
            encoder.mkdir(parents=True)
            name = run.name.replace("-all-", "-whole-")
            (encoder / "weights").write_text(name if self._is_cut_free else run.name)
            summary |= _pretrained(run)
        (workdir / "summary.json").write_text(json.dumps(summary))


def _pretrained(run):
    if run.module == table1_xnli.BERT:
        losses = [{"step": step, "loss": {"en": 7.0 - step}} for step in (0, 2)]
        return {"held_out": {"whole": losses}}
    figures = {
        **{"fake_token_rate": 0.1, "rtd_auc": 0.5, "sampled_mlm_accuracy": 0.02},
        **{"clm_accuracy": 0.11, "unigram_accuracy": 0.08},
    }
    return {
        "held_out": [
            {"step": step, "languages": {"en": figures, "de": figures}}
            for step in (0, 150)
        ],
        "probes": [{"step": step, "translation_gap": GAP} for step in (0, 150)],
        "generators": [],
    }


def _fine_tuned(run, workdir):
    """As it comes half of the rows are right; of others one more in the far ones."""
    seed, encoder = int(_flag(run, "seed")), _flag(run, "encoder")
    folder = workdir / "finetune" / "predictions"
    folder.mkdir(parents=True)
    accuracy = {}
    for language in LANGUAGES:
        marks = list(RIGHT)
        if encoder and language in xnli_rows.FAR:
            marks[3] = "1"
        accuracy[language] = marks.count("1") / len(marks)
        lines = ["id\tlabel\tprediction"]
        lines += [
            f"{n}\tyes\t{'yes' if m == '1' else 'no'}" for n, m in enumerate(marks)
        ]
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"test.{language}.tsv").write_text(text)
    found = {}
    if encoder:  # it is there when it is needed
        found["from"] = (workdir.parents[1] / encoder / "weights").read_text()
    return found | {
        "commit": "abc123, def456",  # it went on by another commit
        "text": {"labels": {"train": {"en": {"neutral": 20_000}}}},
        "test": {
            "average": float(np.mean(list(accuracy.values()))),
            "accuracy": accuracy,
            "rows": dict.fromkeys(LANGUAGES, 10),
            "warnings": [f"ur: {33 + seed}% of 9 is no better than a guess (40%)"],
        },
    }


def _flag(run, name):
    for each in run.arguments:
        if each.startswith(f"--{name}="):
            return each.partition("=")[2]
    return ""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which the table is made."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(stub, seeds=("0", "1"), scale="six"):
    table = tiny_tables.table(scale=scale, seeds=seeds)
    runs = table_runs.Runs(table.workdir, xnli_rows.figures, stub)
    found = table1_xnli.record(runs, table)
    return found["rows"], found["across_is_same"]


def test_every_run_is_done_once_and_its_encoder_is_fine_tuned(here):
    stopped = Stub(fails_at="xnli-m3-seed0")
    with pytest.raises(KeyboardInterrupt):
        run_all(stopped)
    second = Stub()
    rows, same = run_all(second)
    assert second.names[0] == "xnli-m3-seed0"
    assert same == {"0": True}
    made = 2 * 2 + 1  # and M3 across clusters
    assert len(stopped.names + second.names) == made + 2 * len(ROWS)
    shutil.rmtree(here / "table" / "models")
    third = Stub()
    assert run_all(third) == (rows, same)
    assert third.names == []
    assert [row["seeds"] for row in rows] == [2] * len(ROWS)
    assert rows[0]["pretraining"] == []
    assert rows[1]["pretraining"][0]["mlm_loss"] == [7.0, 5.0]
    assert rows[2]["pretraining"][0]["gap"] == pytest.approx([0.11, 0.11])
    path = here / "table" / "results" / "xnli-m3-seed1.json"
    assert json.loads(path.read_text())["summary"]["from"] == "m3-whole-seed1"


def test_flags_are_those_of_the_scale():
    """Twelve layers are fine-tuned at the rate that dev pairs chose."""
    runs = table_runs.Runs(pathlib.Path("table"), xnli_rows.figures)
    for scale, layers in (("six", 6), ("twelve", 12)):
        table = tiny_tables.table(scale=scale)
        m3, mlm = (
            table1_xnli.pretraining_run(row, table, "0").arguments
            for row in (table1_xnli.WHOLE, table1_xnli.MLM)
        )
        assert {
            f"--{part}_layers={layers}" for part in ("discriminator", "generator")
        } <= {*m3}
        assert f"--layers={layers}" in mlm
        plain = table1_xnli.fine_tuning_run(table1_xnli.AS_IT_COMES, table, runs, "0")
        assert ("--learning_rate=4e-4" in plain.arguments) == (scale == "twelve")


def test_of_twelve_layers_none_is_made_across_clusters(here):
    stub = Stub()
    rows, same = run_all(stub, scale="twelve")
    assert len(stub.names) == 2 * (2 + 3)
    assert same == {}
    assert list(rows[2]["against"]) == [row["name"] for row in rows[:2]]


def test_the_tiny_scale_has_the_same_rows_in_fewer_steps(here):
    stub = Stub()
    rows, same = run_all(stub, seeds=["0"], scale="tiny")
    assert len(stub.names) == 2 + 3
    assert (same, [row["name"] for row in rows]) == ({}, [row.name for row in ROWS])
    for row, steps in zip(ROWS[1:], (40, 20), strict=True):
        table = tiny_tables.table(scale="tiny", name="table1_tiny")
        made = table1_xnli.pretraining_run(row, table, "0")
        assert f"--steps={steps}" in made.arguments


def test_an_encoder_that_differs_across_clusters_is_named(here):
    _, same = run_all(Stub(is_cut_free=False), seeds=["0"])
    assert same == {"0": False}


def test_fine_tuning_is_of_the_pretraining_that_its_encoder_came_from(
    here, monkeypatch
):
    run_all(Stub(), seeds=["0"])
    monkeypatch.setitem(table1_xnli.STEPS, "six", 7)
    with pytest.raises(errors.NebulaError, match="with other flags"):
        run_all(Stub(), seeds=["0"])
    for path in (here / "table/results").glob("[!x]*.json"):
        path.unlink()
    with pytest.raises(errors.NebulaError, match="what a run with other flags made"):
        run_all(Stub(), seeds=["0"])


def test_an_encoder_that_is_gone_is_made_again_where_it_is_needed(here):
    """Figures alone go on with the table on another machine."""
    first = Stub()
    run_all(first, seeds=["0"])
    shutil.rmtree(here / "table" / "models")
    (here / "table" / "results" / "xnli-m3-seed0.json").unlink()
    second = Stub()
    run_all(second, seeds=["0"])
    assert second.names == ["m3-whole-seed0", "xnli-m3-seed0"]
