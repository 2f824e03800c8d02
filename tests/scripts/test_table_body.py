"""The table of bodies: its runs and its figures."""

import pytest
import tiny_tables

from scripts import table_body
from scripts.tables import runs as table_runs


def test_losses_are_of_the_last_quarter_and_of_all_generators():
    late = {"rtd_loss": 0.3, "clm_loss": 6.0}
    records = [
        {"step": 75, "rtd_loss": 9.0, "clm_loss": 9.0, "generator_0_loss": 9.0},
        {"step": 80, **late, "generator_0_loss": 5.0, "generator_1_loss": 7.0},
        {"step": 80, "held_out_rtd_auc": {"en": 0.5}},
        {"step": 100, **late, "generator_0_loss": 4.0, "generator_1_loss": 6.0},
    ]
    found = table_body.late_losses(records, 100)
    assert found == {"mlm": 5.5, "rtd": pytest.approx(0.3), "clm": 6.0}


def test_a_row_is_compared_with_the_first_one_seed_by_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def figures(run, workdir):
        (seed,) = (int(each[7:]) for each in run.arguments if "--seed=" in each)
        loss = 2.0 + seed + 0.1 * ("--body=modern" in run.arguments)
        summary = {
            **{"seconds": 60.0, "commit": "abc"},
            "held_out": [{"languages": {"en": {"rtd_auc": 0.75}}}],
        }
        losses = dict.fromkeys(table_body.LOSSES, loss)
        return {"summary": summary, "losses": losses, "flops": 2.5e9}

    table = tiny_tables.table()
    runs = table_runs.Runs(table.workdir, figures, lambda run, workdir: None)
    first, second, *_ = table_body.record(runs, table)["rows"]
    assert first["differences"]["mlm"] == [0.0, 0.0]
    assert second["differences"]["mlm"] == pytest.approx([0.1, 0.1])
