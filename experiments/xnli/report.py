"""The report of an XNLI run: summary.json, its Markdown, predictions as TSV."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.xnli import config
from experiments.xnli import data as xnli_data
from nebula_jax.data import nli
from nebula_jax.evaluation import xnli
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import page, plots
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import metrics


def evaluate(
    parts: Mapping[str, xnli_data.Part], probabilities: Mapping[str, np.ndarray]
) -> dict[str, xnli.Score]:
    """Scores every language, given probabilities [N, C] of its N pairs."""
    return {
        language: xnli.score(
            part.labels, probabilities[language].argmax(axis=-1), len(nli.LABELS)
        )
        for language, part in parts.items()
    }


def as_json(scores: Mapping[str, xnli.Score]) -> dict[str, Any]:
    """Turns scores into a summary's entry of a split."""
    accuracies = {language: each.accuracy for language, each in scores.items()}
    return {
        "average": xnli.average(accuracies),
        "accuracy": accuracies,
        "rows": {language: each.total for language, each in scores.items()},
        "labels": {language: list(each.labels) for language, each in scores.items()},
        "predicted": {
            language: list(each.predicted) for language, each in scores.items()
        },
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
            prediction = nli.LABELS[row.argmax()]
            numbers = (f"{number:.4f}" for number in row)
            lines.append("\t".join([name, nli.LABELS[label], prediction, *numbers]))
        path = folder / f"{split}.{language}.tsv"
        path.write_text("".join(line + "\n" for line in lines), "utf-8")


def summary(
    run: config.Run,
    text: xnli_data.Text,
    scores: Mapping[str, xnli.Score],
    position: Mapping[str, Any],
    folder: pathlib.Path,
    command: float,
) -> dict[str, Any]:
    """Gathers the record of a run; its cluster's metrics and summary are in `folder`.

    Scores are of the split that is tested. The loop's position has the selected step,
    the dev curve, and the commits that trained the run. `command` is the wall time of
    this command in seconds.
    """
    training = run_report.read_summary(folder)
    seconds = run_report.wall_seconds(command, [training])
    own = {name: getattr(run.local, name) for name in ("epochs", "split", "data_dir")}
    return {
        **run_report.provenance(seconds, commits=position["commits"]),
        "flags": dataclasses.asdict(run.agreed) | own,
        "text": {"digest": text.digest, "labels": xnli_data.describe(text)},
        "vocabulary": len(text.keep),
        "training": training,
        "losses": run_report.first_and_last(metrics.read(folder)),
        "dev": [{"step": step, "accuracy": value} for step, value in position["curve"]],
        "selected_step": position["selected_step"],
        "test": as_json(scores),
    }


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders a run's summary."""
    training, settings = summary["training"], summary["flags"]
    pairs = sum(summary["text"]["labels"]["train"]["en"].values())
    speed = (
        f", {pairs:,} English pairs, {training['tokens_per_second']:,.0f} tokens/s with"
        " compiling and dev evaluations"
    )
    resumed = ""
    if training["first_step"] > 1:
        resumed = (
            f"The run was resumed after step {training['first_step'] - 1}: minutes and"
            " tokens/s are of what came then."
        )
    curve = (f"{each['accuracy']:.1%} ({each['step']})" for each in summary["dev"])
    step = summary["selected_step"]
    return run_report.join(
        run_report.heading(summary, f"seed {settings['seed']}", speed),
        resumed,
        f"English dev (after step): {', '.join(curve)}. Tested: step {step} of"
        f" {training['last_step']}.",
        results_markdown(
            summary["test"],
            title(settings.get("split", "test"), settings["encoder"], step),
        ),
    )


def write_page(folder: pathlib.Path, cluster: pathlib.Path) -> None:
    """Writes the page of a run, whose summary is there; `cluster` has its metrics."""
    summary, records = run_report.read_summary(folder), metrics.read(cluster)
    losses = [(each["step"], each["loss"]) for each in records if "loss" in each]
    dev = [(each["step"], each["accuracy"]) for each in summary["dev"]]
    panels = [
        plots.Panel("Training", "nats a pair", {"loss": losses}),
        plots.Panel("English dev", "accuracy", {"accuracy": dev}),
    ]
    training = [summary["training"]] if summary["training"] else []
    page.of_run(folder / page.NAME, summary, training, markdown(summary), panels)


def title(split: str, encoder: str, step: int) -> str:
    """Names the table of one split."""
    return f"{split} pairs, {encoder} after step {step}"


def results_markdown(results: Mapping[str, Any], title: str) -> str:
    """Renders the accuracies of one split, from `as_json`."""
    rows = [
        [
            language,
            f"{results['rows'][language]:,}",
            f"{accuracy:.1%}",
            " / ".join(map(str, results["labels"][language])),
            " / ".join(map(str, results["predicted"][language])),
        ]
        for language, accuracy in results["accuracy"].items()
    ]
    rows.append([xnli.AVERAGE, "", f"{results['average']:.1%}", "", ""])
    header = ["language", "pairs", "accuracy", "labels e/n/c", "predicted e/n/c"]
    return run_report.join(
        f"**{title}**",
        run_report.table(header, rows),
        "\n".join(f"- {warning}" for warning in results["warnings"]),
    )


def show(markdown: str, warnings: Sequence[str]) -> None:
    """Prints Markdown, and its warnings to standard error as well."""
    run_report.show(markdown)
    for warning in warnings:
        process.message(f"warning: {warning}")
