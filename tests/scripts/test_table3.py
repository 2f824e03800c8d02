import json

import tiny_tables

from scripts import table3_throughput as table3
from scripts.tables import config, pictures
from scripts.tables import runs as table_runs


def test_every_seed_is_run_in_every_way_and_one_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done, digests = [], {"two-clusters-seed1": "other", "moved-seed0": "another"}

    def figures_of(run, workdir):
        return {
            "summary": {"commit": "abc123", "seconds": 60.0},
            "digest": digests.get(run.name, "same"),
            "step_seconds": 0.1,
            "waiting_share": 0.5,
            "curve": [{"step": 10}],
        }

    table = tiny_tables.table()
    runs = table_runs.Runs(
        table.workdir, figures_of, lambda run, workdir: done.append(run)
    )
    found = table3.record(runs, table)
    assert [run.name for run in done] == [
        *("one-process-seed0", "one-cluster-seed0", "two-clusters-seed0"),
        *("one-process-seed1", "one-cluster-seed1", "two-clusters-seed1"),
        "moved-seed0",
    ]
    given = {run.name: run.arguments for run in done}
    assert "--cluster=whole" in given["one-process-seed0"]
    assert table3.LINE in given["two-clusters-seed1"]
    assert table3.LINE not in given["one-cluster-seed1"]
    assert [row["is_identical"] for row in found["rows"]] == [True, True, False]
    assert not found["moved"]["is_identical"]


def test_parameters_that_differ_are_said_to_and_curves_are_drawn(tmp_path):
    """Of the record of the repository, with two clusters slower and of others."""
    path = config.FOLDER / "results" / "table3.json"
    record = json.loads(path.read_text())
    one, two = record["rows"][1:]
    one["step_seconds"], two["step_seconds"] = [0.2, 0.2], [0.25, 0.25]
    two["is_identical"] = record["moved"]["is_identical"] = False
    text = table3.markdown(record)
    assert "| one cluster | 200, 200 | 1.00 | 1.00 |" in text
    assert "| two clusters | 250, 250 | 0.80 | 0.85 |" in text
    assert "**no**" in text
    assert "are **not** those of the run that never moved" in text
    pictures.table3(record, tmp_path / "t.json")
    assert (tmp_path / "t_fig8.png").read_bytes().startswith(b"\x89PNG")
