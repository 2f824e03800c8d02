import tiny_tables

from scripts import table3_throughput as table3
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
