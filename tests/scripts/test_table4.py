import pytest
import tiny_tables

from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts import table4_speedup as table4
from scripts.tables import runs as table_runs

MEASURED = {"generator": 1.6, "discriminator": 4.0}


def test_as_many_micro_batches_as_workers_and_measured_sleeps(tmp_path):
    def figures(run, workdir):
        workers = int(run.name.partition("-")[0].removeprefix("workers"))
        seconds = [4.1, 4.0 + 0.1 * workers, 99.0]
        return {"summary": {"commit": "a", "seconds": 9.0, "step_seconds": seconds}}

    done = []
    runs = table_runs.Runs(tmp_path, figures, lambda run, workdir: done.append(run))
    report.write(tmp_path / "measured.json", MEASURED)
    found = table4.record(runs, tiny_tables.table(workdir=tmp_path))
    assert [run.name for run in done] == [
        f"workers{workers}-200-4000" for workers in table4.WORKERS
    ]
    assert {"--fan_out=8", "--emulate_compute=200,4000"} <= set(done[-1].arguments)
    text = table4.markdown(report.provenance(1.0, commits=["abc123"]) | found)
    assert "| 8 | 4800 | 800 | 6.83 | 4.34 |" in text  # of the median step


def test_a_process_that_fails_is_an_error():
    with pytest.raises(errors.NebulaError, match="a process failed"):
        table4._run("nebula_jax.no_such_module", [[]])
