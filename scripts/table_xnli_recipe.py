"""Compares recipes for fine-tuning an encoder on English: XNLI in 15 languages.

    python -m scripts.table_xnli_recipe --data_dir=../shared/data

English pairs alone can move an encoder away from what its languages share. Each row
fine-tunes the encoder of `xnli_warm.flags` on all of its pairs for one epoch; the last
row is the recipe of that flagfile. English dev chooses the step that is tested; test
rows choose nothing. Rows are compared seed by seed, and by a bootstrap over the test
rows. Runs are done once; after a stop, the same command goes on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from experiments import shared_flags
from nebula_jax.evaluation import xnli
from nebula_jax.runtime import report, run_folder
from scripts.tables import config, xnli_markdown, xnli_rows
from scripts.tables import runs as table_runs

for _name in config.FLAGS:
    if _name != "scale":
        flags.declare_key_flag(_name)

SEEDS = 3  # by default
FLAGFILE = "xnli_warm"
AVERAGE, WEAKEST = 0.65, 0.54
"""Targets of the flagfile's recipe: mean of the languages; the lowest of them."""


class Row(NamedTuple):
    """A recipe."""

    name: str
    key: str
    """In the names of files."""
    arguments: tuple[str, ...]
    """Flags beside those of all."""


ROWS = (
    Row(
        "all layers train",
        "all",
        ("--learning_rate=2e-4", "--layer_decay=0.8", "--freeze_layers=0"),
    ),
    Row(
        "the first six frozen, half the rate",
        "frozen",
        ("--learning_rate=1e-4", "--layer_decay=0.7", "--freeze_layers=6"),
    ),
)


def run_of(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the fine-tuning of a row."""
    return table_runs.Run(
        f"{row.key}-seed{seed}",
        xnli_rows.MODULE,
        (
            *table.arguments(table_runs.flagfile(FLAGFILE)),
            *("--epochs=1", f"--seed={seed}", *row.arguments),
        ),
    )


def gather(runs: table_runs.Runs, table: config.Table) -> list[dict[str, Any]]:
    """Gathers the rows, of the runs that have ended."""
    rows, marks = [], {}
    for row in ROWS:
        found = {seed: runs.found(run_of(row, seed, table)) for seed in table.seeds}
        done = {seed: each for seed, each in found.items() if each is not None}
        if not done:
            continue
        marks[row.name] = {seed: each["right"] for seed, each in done.items()}
        summaries = [each["summary"] for each in done.values()]
        rows.append(
            {
                **{"name": row.name, "flags": list(row.arguments)},
                "dev": [dev_of(each) for each in summaries],
                **xnli_rows.means(summaries),
                "seconds": sum(each["seconds"] for each in summaries),
                "commits": xnli_rows.commits(summaries),
            }
        )
    first = rows[0]["name"]
    for row in rows[1:]:
        apart = xnli_rows.compare(marks[row["name"]], marks[first])
        row["against"] = {first: apart}
    return rows


def dev_of(summary: Mapping[str, Any]) -> float:
    """Returns the accuracy on English dev of the step that a run tested."""
    curve = {each["step"]: each["accuracy"] for each in summary["dev"]}
    return curve[summary["selected_step"]]


def targets(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Holds the recipe of the flagfile against its targets.

    Args:
      row: of the table.
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


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    table = config.from_flags("xnli_recipe", seeds=SEEDS)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, xnli_rows.figures, results=table.results)
        for row in reversed(ROWS):
            for seed in table.seeds:
                runs.result(run_of(row, seed, table))
        rows = gather(runs, table)
    commits = sorted({each for row in rows for each in row["commits"]})
    seconds = sum(row["seconds"] for row in rows)
    result = {
        **report.provenance(seconds, commits=commits, seeds=table.seeds),
        **{"rows": rows, "targets": targets(rows[-1])},
    }
    table_runs.write(result, xnli_markdown.recipes(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
