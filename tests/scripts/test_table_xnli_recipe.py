"""The recipes of fine-tuning: dev pairs choose, test rows only measure."""

import json

import configured
import pytest
import tiny_tables

from experiments.xnli import config as xnli_config
from scripts import table_xnli_recipe
from scripts.tables import config, xnli_markdown, xnli_rows
from scripts.tables import runs as table_runs

RIGHT = {"all": "1100", "six": "1110"}
"""Key of a recipe -> which of four rows are right in each language; none in others."""


class Stub:
    """Leaves behind what fine-tuning does; counts."""

    def __init__(self):
        self.names = []

    def __call__(self, run, workdir):
        self.names.append(run.name)
        marks = RIGHT.get(run.name.partition("-")[0], "0000")
        split = "dev" if "--split=dev" in run.arguments else "test"
        folder = workdir / "predictions"
        folder.mkdir(parents=True)
        for language in ("en", "sw"):
            lines = ["id\tlabel\tprediction"]
            lines += [
                f"{n}\tyes\t{'yes' if m == '1' else 'no'}" for n, m in enumerate(marks)
            ]
            path = folder / f"{split}.{language}.tsv"
            path.write_text("".join(f"{line}\n" for line in lines))
        share = marks.count("1") / 4
        summary = {
            **{"commit": "abc123", "seconds": 60.0},
            "text": {"labels": {"train": {"en": {"neutral": 20}}}},
            "test": {
                **{"average": share, "accuracy": {"en": share, "sw": share}},
                **{"rows": {"en": 4, "sw": 4}, "warnings": []},
            },
        }
        (workdir / "summary.json").write_text(json.dumps(summary))


def test_the_flags_of_every_recipe_can_be():
    flagfile = table_runs.flagfile(table_xnli_recipe.FLAGFILE)
    keys = [row.key for row in table_xnli_recipe.ROWS]
    assert len(set(keys)) == len(keys)
    for row in table_xnli_recipe.ROWS:
        for is_test in (True, False):
            run = table_xnli_recipe.run_of(row, "0", tiny_tables.table(), is_test)
            made = configured.run(
                xnli_config, f"--flagfile={flagfile}", *run.arguments[1:]
            )
            xnli_config.check(made)
            assert made.local.split == ("test" if is_test else "dev")
            assert made.local.epochs == 1


def test_the_flagfile_of_that_name_has_the_recipe_that_was_chosen():
    path = config.FOLDER / "results" / "xnli_recipe.json"
    chosen = json.loads(path.read_text())["chosen"]
    (row,) = (each for each in table_xnli_recipe.ROWS if each.name == chosen)
    run = table_xnli_recipe.run_of(row, "0", tiny_tables.table(), is_test=True)
    flagfile = table_runs.flagfile("xnli_recipe")
    tried = configured.run(xnli_config, *run.arguments)
    kept = configured.run(xnli_config, f"--flagfile={flagfile}")
    assert kept.agreed == tried.agreed
    assert kept.local.epochs == tried.local.epochs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which the table is made."""
    monkeypatch.chdir(tmp_path)
    return tiny_tables.table()


def test_dev_pairs_choose_and_the_chosen_one_alone_is_tested(here):
    stub = Stub()
    runs = table_runs.Runs(here.workdir, xnli_rows.figures, stub)
    assert table_xnli_recipe.work(runs, here, ["choose"]) == "the first six frozen"
    assert all(name.endswith("-dev-seed0") for name in stub.names)
    assert table_xnli_recipe.gather(runs, here, "the first six frozen") == []
    before = len(stub.names)
    table_xnli_recipe.work(runs, here, ["choose", "test"])
    assert stub.names[before:] == ["six-test-seed0", "six-test-seed1"]
    tried = table_xnli_recipe.choose(runs, here)
    assert [each["average"] for each in tried[:2]] == [0.75, 0.5]
    (frozen,) = rows = table_xnli_recipe.gather(runs, here, tried[0]["name"])
    assert frozen["averages"] == [0.75, 0.75]
    assert frozen["accuracy"] == {"en": 0.75, "sw": 0.75, "average": 0.75}
    assert [each["met"] for each in table_xnli_recipe.targets(frozen)] == [True, True]
    low = frozen | {"accuracy": {"en": 0.75, "sw": 0.5, "average": 0.625}}
    assert [each["met"] for each in table_xnli_recipe.targets(low)] == [False, False]
    result = {
        "command": "python -m scripts.table_xnli_recipe",
        "commit": "abc123",
        "hardware": {"cores": 2, "cpu": "c", "python": "3", "jax": "0"},
        **{"seconds": 60.0, "seeds": ["0", "1"], "pairs": 20_000, "tried": tried},
        **{"chosen": frozen["name"], "rows": rows},
        "targets": table_xnli_recipe.targets(frozen),
    }
    block = xnli_markdown.recipes(result)
    assert "with the first seed: the first six frozen." in block
    assert (
        "`--learning_rate=2e-4 --layer_decay=0.8 --freeze_layers=6` | 75.0 |" in block
    )
    assert "| sw | 75.0 ± 0.0 |" in block
    assert "Averages of the first six frozen, seed by seed: 75.0, 75.0." in block
    assert "| average of the languages, the first six frozen" in block
    without = xnli_markdown.recipes(result | {"rows": [], "targets": []})
    assert "test accuracy" not in without
