"""The table of teachers: which runs it is made of, and its figures."""

import json

import pytest
import tiny_tables

from nebula_jax.training import metrics
from scripts import table_teachers
from scripts.tables import runs as table_runs

LANGUAGES = " ".join(table_teachers.GROUPS).split()


def test_every_student_is_paired_with_that_which_learned_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {}

    def execute(run, workdir):
        """Writes what the real commands leave; each is better than the one before."""
        given[run.name] = dict(each.partition("=")[::2] for each in run.arguments)
        folder = workdir / ("whole" if run.module == table_teachers.BERT else "student")
        if run.makes:
            (workdir / run.makes).mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        loss = {each: 9.0 - len(given) for each in LANGUAGES}
        records = [
            {"step": 20, "loss": 1.0, "weight_0": 0.75, "weight_1": 0.25},
            {"step": 20, "held_out_mlm_loss": loss, "held_out_mlm_accuracy": loss},
        ]
        log = metrics.MetricsLog(folder, 0, print)
        for each in records:
            log.write(each.pop("step"), each)
        log.close()
        about = {"first_step": 1, "last_step": 20}
        about |= {"bytes_sent": 40, "bytes_received": 80}
        clusters = [about] * (2 if run.module == table_teachers.DISTILL else 1)
        summary = {"seconds": 6.0, "commit": "abc", "clusters": clusters}
        (workdir / "summary.json").write_text(json.dumps(summary))

    table = tiny_tables.table()
    runs = table_runs.Runs(table.workdir, table_teachers.figures, execute)
    made = table_teachers.record(runs, table)
    names = ["alone-seed0", "alone-seed1", "teacher0", "teacher1"]
    kinds = ("1-learned", "2-1,1", "2-learned")
    names += [f"{kind}-seed{seed}" for kind in kinds for seed in (0, 1)]
    assert list(given) == names
    pieces = {given[name].get("--vocabulary") for name in names[2:]}
    assert pieces == {"table/models/alone-seed0/spiece.model"}
    folders = [f"table/models/teacher{k}" for k in range(2)]
    assert given["1-learned-seed0"]["--teachers"] == folders[0]
    assert given["2-learned-seed1"]["--teachers"].split(",") == folders
    alone, one, *_ = made["rows"]
    assert (alone["differences"], alone["bytes"]) == ([0.0, 0.0], [])
    assert one["differences"] == [-4.0, -4.0]
    assert one["groups"] == [pytest.approx(3.5), pytest.approx(3.5)]
    assert one["bytes"] == [2.0, 4.0]
