"""The recipes of fine-tuning: flags that can be, means, differences and targets."""

import json

import configured
import numpy as np
import pytest
import tiny_tables

from experiments.xnli import config as xnli_config
from scripts import table_xnli_recipe
from scripts.tables import runs as table_runs
from scripts.tables import xnli_markdown, xnli_rows

RIGHT = {"all": "1100", "frozen": "1110"}  # of four test rows in each language


def leave(run, workdir):
    """Leaves behind what a fine-tuning does."""
    marks = RIGHT[run.name.split("-")[0]]
    folder = workdir / "finetune" / "predictions"
    folder.mkdir(parents=True)
    for language in ("en", "sw"):
        lines = ["id\tlabel\tprediction"]
        lines += [
            f"{n}\tyes\t{'yes' if m == '1' else 'no'}" for n, m in enumerate(marks)
        ]
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"test.{language}.tsv").write_text(text)
    accuracy = {"en": marks.count("1") / 4, "sw": marks.count("1") / 4}
    summary = {
        **{"commit": "abc123", "seconds": 60.0, "selected_step": 5},
        "dev": [{"step": 5, "accuracy": 0.75}, {"step": 10, "accuracy": 0.5}],
        "text": {"labels": {"train": {"en": {"neutral": 20}}}},
        "test": {
            "average": float(np.mean(list(accuracy.values()))),
            **{"accuracy": accuracy, "rows": {"en": 4, "sw": 4}, "warnings": []},
        },
    }
    (workdir / "summary.json").write_text(json.dumps(summary))


def test_the_flags_of_every_recipe_can_be_and_the_last_are_the_flagfiles():
    flagfile = table_runs.flagfile(table_xnli_recipe.FLAGFILE)
    plain = configured.run(xnli_config, f"--flagfile={flagfile}", "--data_dir=text")
    for row in table_xnli_recipe.ROWS:
        given = configured.run(
            xnli_config, f"--flagfile={flagfile}", "--data_dir=text", *row.arguments
        )
        xnli_config.check(given)
    assert given.agreed == plain.agreed
    assert plain.local.epochs == 1


def test_rows_have_means_and_differences_from_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tiny_tables.table()
    runs = table_runs.Runs(table.workdir, xnli_rows.figures, leave)
    for row in table_xnli_recipe.ROWS:
        for seed in table.seeds:
            runs.result(table_xnli_recipe.run_of(row, seed, table))
    before, frozen = rows = table_xnli_recipe.gather(runs, table)
    assert before["averages"] == [0.5, 0.5]
    assert frozen["accuracy"] == {"en": 0.75, "sw": 0.75, "average": 0.75}
    assert frozen["against"]["all layers train"]["all"]["mean"] == pytest.approx(0.25)
    targets = table_xnli_recipe.targets(frozen)
    assert [each["met"] for each in targets] == [True, True]
    assert [each["met"] for each in table_xnli_recipe.targets(before)] == [False, False]
    result = {
        "command": "python -m scripts.table_xnli_recipe",
        "commit": "abc123",
        "hardware": {"cores": 2, "cpu": "c", "python": "3", "jax": "0"},
        **{"seconds": 60.0, "seeds": ["0", "1"], "rows": rows, "targets": targets},
    }
    block = xnli_markdown.recipes(result)
    assert "English dev, of the step that is tested: 75.0%, 75.0%\n" in block
    assert "| sw | 50.0 ± 0.0 | 75.0 ± 0.0 |" in block
    assert "| the first six frozen, half the rate | +25.00 (" in block
    assert "| average of the languages, the first six frozen" in block
