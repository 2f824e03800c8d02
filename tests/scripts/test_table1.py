import json
import pathlib

import pytest
import tiny_tables

from nebula_jax import errors
from scripts import table1_xnli
from scripts.tables import paper, xnli_markdown
from scripts.tables import runs as table_runs

LANGUAGES = paper.PAPER["table1"]["languages"]


class Stub:
    """Leaves behind what the real commands would; counts."""

    def __init__(self, fails_at="", is_cut_free=False):
        self.names, self._fails_at = [], fails_at
        self._is_cut_free = is_cut_free

    def __call__(self, run, workdir):
        if run.name == self._fails_at:
            raise KeyboardInterrupt
        self.names.append(run.name)
        summary = {"commit": "abc123", "seconds": 60.0}
        if run.module == "experiments.pretrain_m3":
            encoder = workdir / run.makes.path
            encoder.mkdir(parents=True)
            name = run.name.replace("-whole-", "-all-")
            (encoder / "weights").write_text(name if self._is_cut_free else run.name)
            figures = {"fake_token_rate": 0.1, "rtd_auc": 0.5}
            summary["held_out"] = [
                {"step": step, "languages": {"en": figures, "de": figures}}
                for step in (0, 150)
            ]
        else:
            summary["commit"] = "abc123, def456"  # it went on by another commit
            seed = int(_flag(run, "seed"))
            points = 0.6 + 0.01 * seed + 0.002 * ("-all-" in run.name)
            encoder = _flag(run, "encoder")
            if encoder:  # it is there when it is needed
                summary["from"] = (workdir.parents[1] / encoder / "weights").read_text()
            summary |= {
                "text": {"labels": {"train": {"en": {"neutral": 24_000}}}},
                "test": {
                    "average": points,
                    "accuracy": dict.fromkeys(LANGUAGES, points),
                    "rows": dict.fromkeys(LANGUAGES, 3510),
                    "warnings": [
                        "ur: 33% of 9 is no better than a guess (40%)",
                        f"ur: {33 + seed}% of 9 is no better than a guess (40%)",
                        "sw: 34% of 9 is no better than a guess (40%)",
                    ]
                    if seed
                    else [],
                },
            }
        (workdir / "summary.json").write_text(json.dumps(summary))


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


def run_all(stub, seeds=("0", "1")):
    table = tiny_tables.table(scale="small", seeds=seeds)
    runs = table_runs.Runs(table.workdir, table_runs.summary_of, stub)
    table1_xnli.work(runs, table)
    return table1_xnli.gather(runs, table)


def test_every_run_is_done_once_and_its_encoder_is_fine_tuned(here):
    stopped = Stub(fails_at="xnli-m3_xnli15_warm-all-seed0")
    with pytest.raises(KeyboardInterrupt):
        run_all(stopped)
    second = Stub()
    rows = run_all(second)
    assert second.names[0] == "xnli-m3_xnli15_warm-all-seed0"
    # Three rows have an M3 run of their own, and all four are fine-tuned, twice.
    assert len(stopped.names + second.names) == 2 * (3 + 4)
    third = Stub()
    assert run_all(third) == rows
    assert third.names == []
    assert [row["seeds"] for row in rows] == [2] * 4
    assert [row["commits"] for row in rows] == [["abc123", "def456"]] * 4
    assert rows[0]["pretraining"] == []
    assert rows[1]["pretraining"][0]["fake_token_rate"] == [0.1, 0.1]
    for kind in ("whole", "all"):
        name = f"xnli-m3_xnli15_warm-{kind}-seed1"
        result = json.loads((here / "table" / "results" / f"{name}.json").read_text())
        assert result["summary"]["from"] == f"m3_xnli15_warm-{kind}-seed1"


def test_the_same_encoder_is_not_fine_tuned_twice(here):
    """M3 across clusters, where it leaves the bytes that M3 in one leaves."""
    rows = run_all(Stub(), seeds=["0"])
    assert [row["not_fine_tuned_again"] for row in rows] == [0] * 4
    stub = Stub(is_cut_free=True)
    rows = run_all(stub)
    assert "xnli-m3_xnli15_warm-whole-seed1" in stub.names
    assert "xnli-m3_xnli15_warm-all-seed1" not in stub.names
    assert "xnli-m3_xnli15_tiny-all-seed1" in stub.names
    assert [row["not_fine_tuned_again"] for row in rows] == [0, 0, 1, 0]
    assert rows[2]["averages"][1] == rows[1]["averages"][1]
    # Its minutes are counted once, and it is done.
    assert [row["seconds"] for row in rows] == [120.0, 120.0, 60.0, 120.0]
    again = Stub(is_cut_free=True)
    assert run_all(again) == rows
    assert again.names == []


def test_fine_tuning_is_of_the_pretraining_that_its_encoder_came_from(
    here, monkeypatch
):
    run_all(Stub(), seeds=["0"])
    changed = {**table1_xnli.SCALES["small"], table1_xnli.WARM: ("--steps=7",)}
    monkeypatch.setitem(table1_xnli.SCALES, "small", changed)
    with pytest.raises(errors.NebulaError, match="with other flags"):
        run_all(Stub(), seeds=["0"])
    for name in ("whole", "all"):
        (here / "table/results" / f"m3_xnli15_warm-{name}-seed0.json").unlink()
    with pytest.raises(errors.NebulaError, match="what a run with other flags made"):
        run_all(Stub(), seeds=["0"])


def test_an_encoder_made_again_replaces_the_old_one(here):
    run = table1_xnli.pretraining_run(
        table1_xnli.ROWS[1], "0", tiny_tables.table(scale="small")
    )
    runs = table_runs.Runs(pathlib.Path("table"), table_runs.summary_of, Stub())
    for _ in range(2):
        made = runs.made(run.makes.name)
        if made.exists():
            (made / "weights").write_text("old")
        runs.path(run.name).unlink(missing_ok=True)
        runs.result(run)
        assert (made / "weights").read_text() == run.name


def test_the_table_has_means_deviations_and_the_papers_rows(here):
    rows = run_all(Stub())
    assert rows[0]["accuracy"]["average"] == pytest.approx(0.605)
    assert rows[0]["deviation"]["en"] == pytest.approx(0.01 / 2**0.5)
    result = {
        "command": "python -m scripts.table1_xnli",
        "commit": "abc123",
        "hardware": {"cores": 2, "cpu": "c", "python": "3", "jax": "0"},
        "seconds": 60.0,
        "seeds": ["0", "1"],
        "rows": rows,
        "targets": table1_xnli.targets(rows),
    }
    block = xnli_markdown.table1(result, paper.PAPER["table1"])
    assert "| paper: ERNIE-M Extra (Nebula-I) | 89.4 | 85.1 |" in block
    assert "| 75.7 | 82.2 | |" in block
    assert "| as it comes | 60.5 ± 0.7 |" in block
    assert "10.0% → 10.0%" in block
    assert "| after M3 across clusters | +0.2, +0.2 |" in block
    assert "from scratch: fine-tuned with `--length_buckets=20" in block
    assert "- as it comes, with some seed: no better than a guess in sw, ur\n" in block
    assert "| 0.200 | ≤ 0.5 | met |" in block


def test_m3_across_clusters_too_far_from_one_cluster_is_told():
    rows = [
        {"name": row.name, "averages": averages}
        for row, averages in zip(
            table1_xnli.ROWS,
            ((0.6, 0.6), (0.61, 0.6), (0.62, 0.6), (0.4, 0.4)),
            strict=True,
        )
    ]
    (found,) = table1_xnli.targets(rows)
    assert found["value"] == pytest.approx(1.0)
    assert not found["met"]
    assert table1_xnli.targets(rows[:2]) == []
