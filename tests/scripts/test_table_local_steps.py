"""The table of local steps: its runs, its figures, and its Markdown."""

import json

import pytest
import tiny_tables

from nebula_jax.training import diloco
from scripts import table_local_steps
from scripts.tables import config
from scripts.tables import runs as table_runs


def test_a_step_where_no_round_is_due_is_told_from_the_others():
    """What is due after 40 and 41 is in the records of 40 and 50; 10, 20: warm-up."""
    rule = diloco.Config(inner_steps=40, delay=1)
    seconds = {10: 1.0, 20: 1.0, 30: 1.0, 40: 3.0, 50: 2.0, 60: 1.0}
    records, now = [{"step": 0, "time": 0.0, "loss": 1.0}], 0.0
    for step, each in seconds.items():
        now += 10 * each
        records.append({"step": step, "time": now, "loss": 1.0})
    found = table_local_steps.step_seconds(records, rule)
    assert found == {"all": pytest.approx(7 / 4), "between": 1.0}


def test_differences_are_paired_by_seed():
    losses = {"all_reduce": {"0": 2.0, "1": 4.0}, "streaming2": {"0": 2.2, "1": 4.0}}
    found = table_local_steps.difference(losses, "streaming2")
    assert found["mean"] == pytest.approx(0.05)
    assert found["standard_error"] == pytest.approx(0.05)
    assert table_local_steps.difference(losses, "all_reduce") is None


def test_every_row_trains_on_the_same_batches():
    rows = table_local_steps.ROWS
    assert len({row.key for row in rows}) == len(rows)
    assert not any(table_local_steps.BATCH % row.clusters for row in rows)


def test_the_heading_counts_every_run_that_was_read(tmp_path, monkeypatch):
    """Fine-tunings, the run over a line and that of adapters are in no row's."""
    monkeypatch.chdir(tmp_path)
    names = []

    def figures(run, workdir):
        names.append(run.name)
        kind = run.name.partition("-")[0]
        other = kind if kind in ("xnli", "time", "adapters") else "bert"
        curve = [{"step": step, "loss": {"en": 6.0 - step}} for step in (0, 1)]
        summary = {
            **{"seconds": 60.0, "commit": other},
            "flags": {"clusters": 2, "inner_steps": 60, "fragments": 2, "delay": 5},
            "held_out": {"whole": curve},
            "bytes": {"sent": 100, "formula": 100, "fewer": 400},
            "dev": [{"accuracy": 0.4}],
            "clusters": [{"rounds": {"parameters": 1}, "last_step": 1}],
        }
        return {"summary": summary, "step": [{"all": 1.0, "between": 1.0}]}

    def execute(run, workdir):
        if run.makes:
            (workdir / run.makes).mkdir(parents=True)

    table = tiny_tables.table()
    runs = table_runs.Runs(table.workdir, figures, execute)
    made = table_local_steps.record(runs, table)
    assert [len(row["xnli"]) for row in made["rows"]] == [2, 2, 0]
    found = runs.provenance()
    assert len(set(names)) == len(names)
    assert found["seconds"] == 60 * len(names)
    assert found["commit"] == "adapters, bert, time, xnli"


@pytest.fixture
def record():
    return json.loads((config.FOLDER / "results" / "local_steps.json").read_text())


def test_adapters_are_shown_by_their_bytes(record):
    summary = {
        "clusters": [{"rounds": {"parameters": 1_000_000}, "last_step": 60}] * 2,
        "bytes": {"sent": 1_200_000, "fewer": 400.0},
        "flags": {"clusters": 2},
    }
    found = table_local_steps.adapters_of({"summary": summary})
    assert found["bytes_a_step"] == 10_000
    text = table_local_steps.markdown(record | {"adapters": found})
    assert "1,000,000 parameters train, and 10,000 bytes a step leave each" in text
