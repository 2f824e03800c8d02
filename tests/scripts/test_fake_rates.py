import json

import pytest
import tiny_tables

from experiments.m3 import curves as m3_curves
from scripts import fake_rates
from scripts.tables import runs as table_runs


class Stub:
    """Leaves behind what the real command would; fakes follow the temperature."""

    def __init__(self):
        self.runs = []

    def __call__(self, run, workdir):
        self.runs.append(run)
        given = dict(each.lstrip("-").split("=") for each in run.arguments)
        temperature, seed = float(given["temperature"]), int(given["seed"])
        at = {
            step: dict.fromkeys(m3_curves.FIGURES, 0.1 * temperature + step / 1000)
            for step in (0, 20, 60)
        }
        at[60]["rtd_auc"] += 0.01 * seed
        summary = {
            "commit": "abc123",
            "seconds": 90.0,
            "held_out": [
                {"step": step, "languages": {"en": each, "de": each}}
                for step, each in at.items()
            ],
        }
        (workdir / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def gather(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(stub):
        table = tiny_tables.table()
        runs = table_runs.Runs(table.workdir, table_runs.summary_of, stub)
        return fake_rates.gather(runs, table)

    return run


def test_every_setting_is_run_once_a_seed_in_one_process(gather):
    stub = Stub()
    rows = gather(stub)
    assert len(stub.runs) == 2 * len(fake_rates.SETTINGS)
    assert all("--cluster=whole" in run.arguments for run in stub.runs)
    again = Stub()
    assert gather(again) == rows
    assert again.runs == []


def test_the_table_has_first_and_last_of_every_figure(gather):
    rows = gather(Stub())
    rows[-1]["rtd_auc"] = [None, 0.25]  # no fake at first
    block = fake_rates.markdown(
        {
            "command": "python -m scripts.fake_rates",
            "commit": "abc123",
            "hardware": {"cores": 2, "cpu": "c", "python": "3", "jax": "0"},
            "seconds": 720.0,
            "seeds": ["0", "1"],
            "rows": rows,
        }
    )
    expected = "| 2 | 0.15 | 60 | 3 | 20.0% → 26.0% | 20.0% → 26.0% | 0.200 → 0.265 |"
    assert expected in block
    assert "| – → 0.250 |" in block
    assert "Commit abc123, seeds 0, 1, 2 cores of c" in block
