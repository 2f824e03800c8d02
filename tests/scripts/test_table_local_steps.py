"""The table of local steps: its runs, its figures, its Markdown and its picture."""

import pytest
import tiny_tables

from nebula_jax.training import diloco
from scripts import table_local_steps
from scripts.tables import pictures
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
    row = table_local_steps.ROWS[1]
    found = table_local_steps.difference(losses, row)
    assert found["mean"] == pytest.approx(0.05)
    assert found["standard_error"] == pytest.approx(0.05)
    assert table_local_steps.difference(losses, table_local_steps.ALL_REDUCE) is None


def test_every_row_trains_on_the_same_batches():
    keys = [row.key for row in table_local_steps.ROWS]
    assert len(set(keys)) == len(keys)
    for row in table_local_steps.ROWS:
        assert table_local_steps.BATCH % row.clusters == 0
        assert not row.reference or row.reference in keys


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
        if run.makes is not None:
            (workdir / run.makes.path).mkdir(parents=True)

    table = tiny_tables.table()
    runs = table_runs.Runs(table.workdir, figures, execute)
    table_local_steps.record(runs, table)
    found = runs.provenance()
    assert len(set(names)) == len(names)
    assert found["seconds"] == 60 * len(names)
    assert found["commit"] == "adapters, bert, time, xnli"


def record():
    sizes = {
        "tokens": 1000,
        "per_token": 2.0,
        "all_reduce_per_token": 1000.0,
        "fewer": 500.0,
    }
    common = {
        **{"inner_steps": 60, "fragments": 2, "delay": 5},
        "curve": [(0, 9.0), (10, 6.0), (20, 5.0)],
    }
    rows = [
        {
            **{"name": "all-reduce", "key": "all_reduce", "reference": ""},
            **{"clusters": 1, "is_all_reduce": True, "bytes": {}, **common},
            **{"losses": {"0": 5.0, "1": 5.0}, "difference": None},
            "xnli": [0.45, 0.47],
        },
        {
            **{"name": "streaming, e3m0", "key": "streaming2"},
            **{"reference": "all_reduce", "clusters": 2, "is_all_reduce": False},
            **{"bytes": sizes, **common, "losses": {"0": 5.1, "1": 5.1}},
            "difference": {"mean": 0.02, "standard_error": 0.0, "seeds": 2},
            "xnli": [0.46, 0.46],
        },
    ]
    hardware = {"cpu": "a CPU", "cores": 2, "python": "3.11", "jax": "0.10"}
    return {
        **{"command": "python -m x", "commit": "abc", "hardware": hardware},
        **{"seconds": 60.0, "seeds": ["0", "1"], "rows": rows, "steps": 20},
        **{"batch": 64, "line": "60mbit,15ms"},
        "time": {"all": 0.103, "between": 0.1, "sent": 1001, "formula": 1000},
        "adapters": {"parameters": 1, "bytes_a_step": 1.0, "fewer": 1.0},
    }


def test_adapters_are_shown_by_their_bytes():
    summary = {
        "clusters": [{"rounds": {"parameters": 1_000_000}, "last_step": 60}] * 2,
        "bytes": {"sent": 1_200_000, "fewer": 400.0},
        **{"flags": {"clusters": 2}, "seconds": 3.0},
    }
    found = table_local_steps.adapters_of({"summary": summary})
    assert found["bytes_a_step"] == 10_000
    text = table_local_steps.markdown(record() | {"adapters": found})
    assert "1,000,000 parameters train, and 10,000 bytes a step leave each" in text


def test_what_was_to_be_reached_stands_beside_what_was():
    found = table_local_steps.targets(record())
    met = {each["what"]: each["met"] for each in found}
    assert met == {
        "streaming, e3m0, 2 clusters: loss over all-reduce's": False,
        "streaming, e3m0, 2 clusters: times fewer bytes a token": True,
        "bytes over the formula's, as sent over 60mbit,15ms": True,
        "time of a step at 60mbit,15ms over computing alone": False,
        "XNLI English dev, streaming and all-reduce: difference, points": True,
    }


def test_an_all_reduce_is_drawn_with_the_bytes_of_each_number_of_clusters():
    """Its steps are the same; among four clusters each costs three times as much."""
    found = record()
    two = found["rows"][1]
    sizes = two["bytes"] | {"per_token": 6.0, "all_reduce_per_token": 3000.0}
    explored = two | {"clusters": 8, "is_explored": True, "bytes": {}}
    found["rows"] += [two | {"clusters": 4, "bytes": sizes}, explored]
    drawn = {each.label: (each.style, each.points) for each in pictures.curves(found)}
    step = 1000 / 20  # tokens
    assert drawn == {
        f"{name}, {clusters} clusters": (
            *(style, [(10 * rate * step, 6.0), (20 * rate * step, 5.0)]),
        )
        for name, style, clusters, rate in (
            ("all-reduce", "--", 2, 1000),
            ("all-reduce", "--", 4, 3000),
            ("streaming, e3m0", "-", 2, 2),
            ("streaming, e3m0", "-", 4, 6),
        )
    }


def test_the_table_and_the_picture(tmp_path):
    text = table_local_steps.markdown(record())
    row = "| streaming, e3m0 | 2 | 60, 2, 5 | 5.1000 | +2.00% ± 0.00% | 2.00 | 500 | 46"
    assert row in text
    pictures.local_steps(record(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
