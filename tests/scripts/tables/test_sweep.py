import json

from absl import flags
from absl.testing import flagsaver

from experiments import shared_flags  # noqa: F401  (defines --out and others)
from nebula_jax.runtime.records import report
from scripts.tables import runs as table_runs
from scripts.tables import sweep


def test_a_column_reads_a_row_by_its_keys_or_by_a_function():
    columns = [
        sweep.Column("row", "name"),
        sweep.Column("BLEU", "bleu.test", ".1f"),
        sweep.Column("faster", lambda row: row.get("faster"), ".2f"),
    ]
    rows = [
        {"name": "a", "bleu": {"test": [1.0, 2.25]}, "faster": 2},
        {"name": "b", "bleu": {"test": 3}},
    ]
    text = sweep.table(columns, rows)
    assert text.splitlines()[0] == "| row | BLEU | faster |"
    assert text.splitlines()[2:] == ["| a | 1.0, 2.2 | 2.00 |", "| b | 3.0 | – |"]
    assert sweep.table(columns, []) == ""


def test_a_target_is_met_up_to_its_limit():
    assert report.at_most("a", 1.0, 1.0)["met"]
    assert not report.at_most("a", 1.1, 1.0)["met"]
    assert report.at_least("a", 1.0, 1.0)["met"]
    assert not report.at_least("a", 0.9, 1.0)["met"]


def test_a_sweep_does_each_run_once_and_writes_record_and_picture(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    done = []

    def execute(run, workdir):
        done.append(run.name)
        summary = {"commit": "abc123", "seconds": 60.0}
        (workdir / "summary.json").write_text(json.dumps(summary))

    def record(runs, table):
        for seed in table.seeds:
            runs.result(table_runs.Run(f"seed{seed}", "m", (f"--seed={seed}",)))
        return {"rows": [{"name": table.name}]}

    def markdown(found):
        columns = [sweep.Column("row", "name")]
        heading = report.heading(found, report.seeds(found))
        return report.join(heading, sweep.table(columns, found["rows"]))

    def draw(found, out):
        out.with_suffix(".png").write_text(str(len(found["rows"])))

    made = sweep.Sweep("a", record, markdown, execute=execute, draw=draw, seeds=2)
    flags.FLAGS(["test"])
    # The folder of runs that stay elsewhere has nothing in it, but for what is made.
    given = {"data_dir": "text", "workdir": "runs", "results_dir": "done"}
    with flagsaver.flagsaver(**given, out="runs/a.json"):
        assert made.run() == made.run() == 0
    assert done == ["seed0", "seed1"]
    found = json.loads((tmp_path / "runs" / "a.json").read_text())
    assert (found["commit"], found["seconds"]) == ("abc123", 120.0)
    assert found["seeds"] == ["0", "1"]
    assert (tmp_path / "runs" / "a.png").read_text() == "1"
    told = capsys.readouterr().out
    assert "| row |\n|---|\n| a |" in told
    assert "report: runs/a.json\n" in told  # there is no page that takes it
    (tmp_path / "runs" / "a.md").touch()
    table_runs.write(found, "", tmp_path / "runs" / "a.json")
    assert "make_tables puts it into its page" in capsys.readouterr().out


def test_a_mean_over_seeds_has_its_error_and_that_no_sign():
    assert sweep.spread([], ".1f") == ""
    assert sweep.spread([2.0], "+.1f") == "+2.0"
    assert sweep.spread([1.0, 3.0], "+.2f") == "+2.00 ± 1.41"
    assert sweep.spread([1.0, 3.0], "+.2f", of_mean=True) == "+2.00 ± 1.00"
    assert sweep.mean_and_error(-0.25, 0.125, "+.1%") == "-25.0% ± 12.5%"
