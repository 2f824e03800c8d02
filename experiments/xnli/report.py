"""The end of an XNLI run: a table for a person, summary.json, predictions as TSV."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import rich.console
import rich.table
from absl import flags

from experiments import lifecycle, run_report, shared_flags
from experiments.xnli import config as xnli_config
from experiments.xnli import data as xnli_data
from nebula_jax.data import nli
from nebula_jax.evaluation import xnli
from nebula_jax.training import metrics


def judge(
    parts: Mapping[str, xnli_data.Part], probabilities: Mapping[str, np.ndarray]
) -> dict[str, xnli.Score]:
    """Language -> score, from [N, C] probabilities of each."""
    return {
        language: xnli.score(
            part.labels, probabilities[language].argmax(axis=-1), len(nli.LABELS)
        )
        for language, part in parts.items()
    }


def as_json(scores: Mapping[str, xnli.Score]) -> dict[str, Any]:
    """What a summary says of scores."""
    accuracies = {language: of.accuracy for language, of in scores.items()}
    return {
        "average": xnli.average(accuracies),
        "accuracy": accuracies,
        "rows": {language: of.total for language, of in scores.items()},
        "labels": {language: list(of.labels) for language, of in scores.items()},
        "predicted": {language: list(of.predicted) for language, of in scores.items()},
        "warnings": xnli.warnings(scores, nli.LABELS),
    }


def write_predictions(
    folder: pathlib.Path,
    split: str,
    parts: Mapping[str, xnli_data.Part],
    probabilities: Mapping[str, np.ndarray],
) -> None:
    """Writes SPLIT.LANG.tsv: id, label, prediction, the three probabilities."""
    folder.mkdir(parents=True, exist_ok=True)
    header = "\t".join(["id", "label", "prediction", *nli.LABELS])
    for language, part in parts.items():
        found = probabilities[language]
        lines = [header]
        for name, label, row in zip(part.rows.ids, part.labels, found, strict=True):
            said = nli.LABELS[row.argmax()]
            numbers = (f"{number:.4f}" for number in row)
            lines.append("\t".join([name, nli.LABELS[label], said, *numbers]))
        path = folder / f"{split}.{language}.tsv"
        path.write_text("".join(line + "\n" for line in lines), "utf-8")


def summary(
    text: xnli_data.Text,
    scores: Mapping[str, xnli.Score],
    position: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """All that is to be said of a run.

    Args:
      text: its pairs.
      scores: language -> score on test.
      position: what the loop knows: the selected step, the dev curve, the commits that
        the run was trained by.
      seconds: wall time of this command.
    """
    folder = shared_flags.cluster_folder(xnli_config.NAME)
    return {
        "command": shared_flags.command(),
        "commit": ", ".join(position["commits"]),
        "hardware": run_report.hardware(),
        "seconds": round(seconds, 1),
        "flags": {
            name: flags.FLAGS[name].value
            for name in (*xnli_config.AGREED, "epochs", "length_buckets", "data_dir")
        },
        "text": {
            "digest": text.digest,
            "from": text.sources,
            "labels": xnli_data.describe(text),
        },
        "vocabulary": len(text.keep),
        "training": run_report.read(folder),
        "losses": run_report.first_and_last(metrics.read(folder)),
        "dev": [{"step": step, "accuracy": value} for step, value in position["curve"]],
        "selected_step": position["selected_step"],
        "test": as_json(scores),
    }


def show(results: Mapping[str, Any], title: str) -> None:
    """Prints the table of one split; warnings go to standard error.

    Args:
      results: from `as_json`.
      title: of the table.
    """
    table = rich.table.Table(title=title)
    table.add_column("language")
    for column in ("pairs", "accuracy", "labels e/n/c", "predicted e/n/c"):
        table.add_column(column, justify="right")
    for language, accuracy in results["accuracy"].items():
        table.add_row(
            language,
            f"{results['rows'][language]:,}",
            f"{accuracy:.1%}",
            " / ".join(map(str, results["labels"][language])),
            " / ".join(map(str, results["predicted"][language])),
        )
    table.add_section()
    table.add_row(xnli.AVERAGE, "", f"{results['average']:.1%}", "", "")
    rich.console.Console(highlight=False, width=88).print(table)
    for warning in results["warnings"]:
        lifecycle.say(f"warning: {warning}")


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    partial.write_text(text, "utf-8")
    partial.replace(path)
