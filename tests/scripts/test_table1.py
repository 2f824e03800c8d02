import json
import pathlib
import shutil

import pytest
import tiny_tables

from nebula_jax import errors
from scripts import table1_xnli
from scripts.tables import runs as table_runs
from scripts.tables import sweep, xnli_rows

LANGUAGES = sweep.PAPER["table1"]["languages"]
ROWS = table1_xnli.ROWS
FIGURES = {
    **{"fake_token_rate": 0.1, "rtd_auc": 0.5, "sampled_mlm_accuracy": 0.02},
    **{"clm_accuracy": 0.11, "unigram_accuracy": 0.08},
}
SUMMARIES = {
    table1_xnli.BERT: {
        "held_out": {
            "whole": [{"step": step, "loss": {"en": 7.0 - step}} for step in (0, 2)]
        }
    },
    table1_xnli.M3: {
        "held_out": [{"step": step, "languages": {"en": FIGURES}} for step in (0, 9)],
        "probes": [{"translation_gap": {"de": 0.12, "sw": 0.1}}] * 2,
    },
    xnli_rows.MODULE: {
        "text": {"labels": {"train": {"en": {"neutral": 20_000}}}},
        "test": {
            "accuracy": dict.fromkeys(LANGUAGES, 0.6),
            **{"rows": dict.fromkeys(LANGUAGES, 10), "warnings": []},
        },
    },
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which the table is made."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(done, seeds=("0", "1"), fails_at="", is_cut_free=True):
    """Makes the table here, and notes its runs in `done`."""

    def execute(run, workdir):
        if run.name == fails_at:
            raise KeyboardInterrupt
        done.append(run.name)
        if run.makes:
            encoder = workdir / run.makes
            encoder.mkdir(parents=True)
            name = run.name.replace("-all-", "-whole-") if is_cut_free else run.name
            (encoder / "weights").write_text(name)

    def figures(run, workdir):
        summary = {"commit": "abc123", "seconds": 60.0, **SUMMARIES[run.module]}
        given = dict(each.partition("=")[::2] for each in run.arguments)
        if "--encoder" in given:  # it is there when it is needed
            weights = pathlib.Path(given["--encoder"], "weights")
            summary["from"] = weights.read_text()
        return {"summary": summary, "right": dict.fromkeys(LANGUAGES, "1110110100")}

    table = tiny_tables.table(scale="six", seeds=seeds)
    found = table1_xnli.record(table_runs.Runs(table.workdir, figures, execute), table)
    return found["rows"], found["across_is_same"]


def test_every_run_is_done_once_and_its_encoder_is_fine_tuned(here):
    stopped, second, third = [], [], []
    with pytest.raises(KeyboardInterrupt):
        run_all(stopped, fails_at="xnli-m3-seed0")
    rows, same = run_all(second)
    assert second[0] == "xnli-m3-seed0"
    assert same == {"0": True}
    made = 2 * 2 + 1  # and M3 across clusters
    assert len(stopped + second) == made + 2 * len(ROWS)
    shutil.rmtree(here / "table" / "models")
    assert run_all(third) == (rows, same)
    assert third == []
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


def test_fine_tuning_is_of_the_pretraining_that_its_encoder_came_from(
    here, monkeypatch
):
    run_all([], seeds=["0"])
    monkeypatch.setitem(table1_xnli.STEPS, "six", 7)
    with pytest.raises(errors.NebulaError, match="with other flags"):
        run_all([], seeds=["0"])
    for path in (here / "table/results").glob("[!x]*.json"):
        path.unlink()
    with pytest.raises(errors.NebulaError, match="what a run with other flags made"):
        run_all([], seeds=["0"])


def test_an_encoder_that_is_gone_is_made_again_where_it_is_needed(here):
    """Figures alone go on with the table on another machine."""
    assert run_all([], seeds=["0"], is_cut_free=False)[1] == {"0": False}
    shutil.rmtree(here / "table" / "models")
    (here / "table" / "results" / "xnli-m3-seed0.json").unlink()
    second = []
    run_all(second, seeds=["0"])
    assert second == ["m3-whole-seed0", "xnli-m3-seed0"]
