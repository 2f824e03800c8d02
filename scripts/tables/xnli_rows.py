"""Rows of a table of XNLI: their means over seeds, and one held against another."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax import errors
from nebula_jax.evaluation import xnli
from scripts.tables import runs as table_runs

MODULE = "experiments.finetune_xnli"
FAR = ("sw", "ur", "hi", "th")
"""Languages far from English; the encoder as it comes is weak in them."""
SAMPLES, SURE = 2000, 0.95  # of the bootstrap, and of its intervals


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads a finished run's figures: its summary, and which test rows were right."""
    found = table_runs.summary_of(run, workdir)
    if run.module != MODULE:
        return found
    return found | {"right": right(next(workdir.rglob("predictions")))}


def right(folder: pathlib.Path) -> dict[str, str]:
    """Reads predictions: language -> a 1 for each test row that is right, else a 0.

    A row that is not the same sentence pair in all languages is an error.
    """
    found, first, wanted = {}, "", []
    for path in sorted(folder.glob("test.*.tsv")):
        rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()[1:]]
        ids = [row[0] for row in rows]
        first, wanted = first or path.name, wanted or ids
        if ids != wanted:
            raise errors.NebulaError(
                f"{path} and {first} have other pairs, or the same in another order:"
                " rows are compared over all languages, so give the test files of"
                " --data_dir the same ids in the same order"
            )
        marks = ("1" if row[1] == row[2] else "0" for row in rows)
        found[path.name.split(".")[1]] = "".join(marks)
    return found


def means(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Takes the means over seeds of a row, from the summaries of its fine-tunings.

    The deviation of the average is that of the seeds' averages.
    """
    runs = [each["test"]["accuracy"] for each in summaries]
    values = {language: [run[language] for run in runs] for language in runs[0]}
    values[xnli.AVERAGE] = [xnli.average(run) for run in runs]
    lines = {line for each in summaries for line in each["test"]["warnings"]}
    return {
        "seeds": len(summaries),
        "accuracy": {name: float(np.mean(each)) for name, each in values.items()},
        "deviation": {
            name: float(np.std(each, ddof=1)) if len(each) > 1 else 0.0
            for name, each in values.items()
        },
        "warnings": sorted(lines),
        "pairs": sum(summaries[0]["text"]["labels"]["train"]["en"].values()),
        "rows": min(summaries[0]["test"]["rows"].values()),
    }


def compare(
    one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Compares two rows of a table, seed by seed and by a paired bootstrap.

    Both are seed -> what `right` returns. A test row is the same sentence pair in all
    languages, and so is drawn with all of them, and for all seeds. Returns `all` and
    `far` languages -> `by_seed`, differences of the average accuracy; `mean`;
    `interval`, which the differences of SURE of the draws are in.
    """
    seeds = [seed for seed in one if seed in other]
    random = np.random.default_rng(0)
    languages = sorted(next(iter(one.values())))
    rows = len(one[seeds[0]][languages[0]])
    draws = random.integers(rows, size=(SAMPLES, rows))
    weights = np.stack([np.bincount(draw, minlength=rows) for draw in draws]) / rows
    found = {}
    for name, chosen in (("all", languages), ("far", FAR)):
        chosen = [each for each in chosen if each in languages]
        if not chosen:
            continue
        # [seeds, rows], the mean of the languages.
        apart = np.stack(
            [_mean(one[seed], chosen) - _mean(other[seed], chosen) for seed in seeds]
        )
        edges = np.quantile(weights @ apart.mean(0), [(1 - SURE) / 2, (1 + SURE) / 2])
        found[name] = {
            "by_seed": apart.mean(1).tolist(),
            "mean": float(apart.mean()),
            "interval": edges.tolist(),
        }
    return found


def _mean(marks: Mapping[str, str], languages: Sequence[str]) -> np.ndarray:
    """Returns the share of languages in which each test row is right, [rows]."""
    return np.mean(
        [
            np.frombuffer(marks[each].encode(), np.uint8) == ord("1")
            for each in languages
        ],
        axis=0,
    )
