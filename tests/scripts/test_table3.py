import pytest
import tiny_tables

from nebula_jax.runtime.records import report
from scripts import table3_throughput as table3
from scripts.tables import pictures
from scripts.tables import runs as table_runs

SECONDS = {"one": 0.1, "one-cluster": 0.2, "two": 0.25}


@pytest.fixture
def gather(tmp_path, monkeypatch):
    """Gathers the record of runs that end with `digests`: name -> digest."""
    monkeypatch.chdir(tmp_path)

    def run(digests=None, done=None):
        def figures_of(run, workdir):
            del workdir
            name = run.name.rpartition("-seed")[0]
            cluster = "whole" if name == "one-process" else "discriminator"
            curve = [
                {
                    "step": step,
                    "cluster": cluster,
                    "rtd_loss": 0.5,
                    "clm_loss": 8.0 / step,
                }
                for step in (10, 20)
            ]
            if name == "moved":
                curve[0]["cluster"] = "whole"
            return {
                "summary": {"commit": "abc123", "seconds": 60.0},
                "digest": (digests or {}).get(name, "same"),
                "step_seconds": {"one-process": 0.1, "one-cluster": 0.2}.get(
                    name, 0.25
                ),
                "waiting_share": 0.5,
                "curve": curve,
            }

        def execute(run, workdir):
            del workdir
            (done if done is not None else []).append(run)

        table = tiny_tables.table()
        runs = table_runs.Runs(table.workdir, figures_of, execute)
        return table3.gather(runs, table)

    return run


def rendered(found):
    about = report.provenance(1.0, commits=["abc123"], seeds=("0", "1"))
    return table3.markdown(about | found)


def test_every_seed_is_run_in_every_way_and_one_moves(gather):
    done = []
    gather(done=done)
    assert [run.name for run in done] == [
        *("one-process-seed0", "one-cluster-seed0", "two-clusters-seed0"),
        *("one-process-seed1", "one-cluster-seed1", "two-clusters-seed1"),
        "moved-seed0",
    ]
    given = {run.name: run.arguments for run in done}
    assert "--cluster=whole" in given["one-process-seed0"]
    assert table3.LINE in given["two-clusters-seed1"]
    assert table3.LINE not in given["one-cluster-seed1"]


def test_throughput_is_beside_one_cluster_and_the_papers(gather):
    text = rendered(gather())
    assert "| one process | 100, 100 | 2.00 | – | 50% | yes |" in text
    assert "| one cluster | 200, 200 | 1.00 | 1.00 | 50% | yes |" in text
    assert "| two clusters | 250, 250 | 0.80 | 0.85 | 50% | yes |" in text
    assert "after step 10. Its parameters after step 400 are those of the run" in text


def test_parameters_that_differ_are_said_to(gather):
    text = rendered(gather({"two-clusters": "other", "moved": "another"}))
    assert "| 0.85 | 50% | **no** |" in text
    assert "are **not** those of the run that never moved" in text


def test_the_figure_is_drawn(gather, tmp_path):
    pictures.figure8(gather()["moved"], tmp_path / "fig8.png")
    assert (tmp_path / "fig8.png").read_bytes().startswith(b"\x89PNG")
