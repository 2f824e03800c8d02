"""Compares recipes for fine-tuning an encoder on English: XNLI in 15 languages.

    python -m scripts.table_xnli_recipe --data_dir=../shared/data

English pairs alone can move an encoder away from what its languages share. Stage
`choose` fine-tunes the encoder of `xnli_warm.flags` by each recipe on some of its
pairs, and chooses the one with the best average on the dev pairs of all languages; no
test row is read. Stage `test` fine-tunes by that one on all pairs, with every seed, and
holds it against the targets. Runs are done once; after a stop, the same command goes
on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments import shared_flags
from nebula_jax.evaluation import xnli
from nebula_jax.runtime.records import run_folder
from scripts.tables import config, xnli_markdown, xnli_rows
from scripts.tables import runs as table_runs

SEEDS = 3  # by default, of stage `test`; stage `choose` has the first
STAGES = ("choose", "test")
FLAGFILE = "xnli_warm"
PAIRS = 20_000
"""Training pairs of stage `choose`."""
AVERAGE, WEAKEST = 0.65, 0.54
"""Targets on test rows: mean of the languages; the lowest of them."""


class Row(NamedTuple):
    """A recipe."""

    name: str
    key: str
    """In the names of files."""
    arguments: tuple[str, ...]
    """Flags beside those of all."""


def recipe(name: str, key: str, rate: str, decay: str, frozen: int) -> Row:
    """Makes a recipe.

    Args:
      name, key: of the row.
      rate: peak of the learning rate, of the top layer.
      decay: rate of a layer over that of the one above it.
      frozen: number of first layers that do not train.
    """
    rates = (f"--learning_rate={rate}", f"--layer_decay={decay}")
    return Row(name, key, (*rates, f"--freeze_layers={frozen}"))


ROWS = (
    recipe("all layers", "all", "2e-4", "0.8", 0),
    recipe("all layers, half the rate, lower layers less", "half", "1e-4", "0.7", 0),
    recipe("the first six frozen", "six", "2e-4", "0.8", 6),
    recipe(
        "the first six frozen, half the rate, lower layers less",
        "six_half",
        "1e-4",
        "0.7",
        6,
    ),
    recipe("all layers, twice the rate", "twice", "4e-4", "0.8", 0),
    recipe("twice the rate, lower layers less", "twice_less", "4e-4", "0.7", 0),
    recipe("all layers, four times the rate", "four", "8e-4", "0.8", 0),
)
"""The first is that of before."""


def run_of(row: Row, seed: str, table: config.Table, is_test: bool) -> table_runs.Run:
    """Describes the fine-tuning of a row.

    Args:
      row: of the table.
      seed: of the run.
      table: its configuration.
      is_test: whether it is of stage `test`.
    """
    own = ("--eval_every=650", "--checkpoint_every=650")
    if not is_test:
        own = (f"--max_train_pairs={PAIRS}", "--split=dev", *own)
    return table_runs.Run(
        f"{row.key}-{'test' if is_test else 'dev'}-seed{seed}",
        xnli_rows.MODULE,
        (
            *table.arguments(table_runs.flagfile(FLAGFILE)),
            *("--epochs=1", f"--seed={seed}", *own, *row.arguments),
        ),
    )


def choose(runs: table_runs.Runs, table: config.Table) -> list[dict[str, Any]]:
    """Returns the recipes that have been tried on dev pairs, the best one first."""
    found = []
    for row in ROWS:
        result = runs.found(run_of(row, table.seeds[0], table, is_test=False))
        if result is not None:
            summary = result["summary"]
            figures = {
                **{"name": row.name, "flags": list(row.arguments)},
                "english": summary["test"]["accuracy"]["en"],
                "average": summary["test"]["average"],
                "seconds": summary["seconds"],
            }
            found.append(figures)
    return sorted(found, key=lambda each: -each["average"])


def gather(
    runs: table_runs.Runs, table: config.Table, chosen: str
) -> list[dict[str, Any]]:
    """Gathers the row of the recipe that was tested; none before a run has ended.

    Args:
      runs: of the table.
      table: its configuration.
      chosen: name of the recipe.
    """
    (row,) = (each for each in ROWS if each.name == chosen)
    found = [runs.found(run_of(row, seed, table, is_test=True)) for seed in table.seeds]
    summaries = [each["summary"] for each in found if each is not None]
    if not summaries:
        return []
    return [{"name": chosen, **xnli_rows.means(summaries)}]


def targets(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Holds a recipe against the targets.

    Args:
      row: of `gather`.
    """
    accuracy = row["accuracy"]
    languages = accuracy.keys() - {xnli.AVERAGE}
    lowest = min(languages, key=accuracy.__getitem__)
    found = (
        ("average of the languages", accuracy[xnli.AVERAGE], AVERAGE),
        (f"weakest language ({lowest})", accuracy[lowest], WEAKEST),
    )
    return [
        {
            "what": f"{what}, {row['name']}",
            "value": value,
            "at_least": least,
            "met": value >= least,
        }
        for what, value, least in found
    ]


def work(runs: table_runs.Runs, table: config.Table, stages: list[str]) -> str:
    """Does the missing runs; returns the name of the recipe that dev pairs chose."""
    if "choose" in stages:
        for row in ROWS:
            runs.result(run_of(row, table.seeds[0], table, is_test=False))
    tried = choose(runs, table)
    chosen = tried[0]["name"] if tried else ROWS[0].name
    if "test" in stages:
        (row,) = (each for each in ROWS if each.name == chosen)
        for seed in table.seeds:
            runs.result(run_of(row, seed, table, is_test=True))
    return chosen


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    table = config.from_flags("xnli_recipe", seeds=SEEDS)
    stages = config.stages(STAGES)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, xnli_rows.figures, results=table.results)
        chosen = work(runs, table, list(stages))
        tried, rows = choose(runs, table), gather(runs, table, chosen)
    about = runs.provenance(table.seeds)
    result = {
        **about,
        **{"pairs": PAIRS, "tried": tried, "chosen": chosen, "rows": rows},
        "targets": [target for each in rows for target in targets(each)],
    }
    table_runs.write(result, xnli_markdown.recipes(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=[*config.FLAGS, "stages"])
