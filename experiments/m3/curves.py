"""The curves of an M3 run: what its metrics have of each step, and their picture."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nebula_jax import installed

FIGURES = (
    "rtd_auc",
    "fake_token_rate",
    "sampled_mlm_accuracy",
    "clm_accuracy",
    "unigram_accuracy",
)


def held_out(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists every evaluation: its step, and language -> figures.

    Args:
      records: metrics of the discriminator.
    """
    evaluations = []
    for record in records:
        if "held_out_rtd_auc" not in record:
            continue
        languages = record["held_out_rtd_auc"]
        evaluations.append(
            {
                "step": record["step"],
                "languages": {
                    name: {
                        figure: record[f"held_out_{figure}"][name]
                        for figure in FIGURES
                        if f"held_out_{figure}" in record
                    }
                    for name in languages
                },
            }
        )
    return evaluations


def probes(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists the probes of every evaluation: its step, and figures by name.

    Args:
      records: metrics of the discriminator.
    """
    return [
        {
            name.removeprefix("probe_"): value
            for name, value in record.items()
            if name == "step" or name.startswith("probe_")
        }
        for record in records
        if any(name.startswith("probe_") for name in record)
    ]


def of_generators(
    found: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[dict[str, Any]]],
) -> list[tuple[str, float | None, list[tuple[int, float]]]]:
    """Returns name, unigram entropy and (step, MLM loss) of every generator.

    Args:
      found: cluster -> its summary.
      records: cluster -> its metrics; the first one has the discriminator, or with
        --cluster=whole all of them.
    """
    first = next(iter(records))
    entropies = found.get(first, {}).get("unigram_entropies", [])
    curves = []
    for k, entropy in enumerate(entropies):
        key = f"generator_{k}_loss"
        curve = [(each["step"], each[key]) for each in records[first] if key in each]
        curves.append((f"generator:{k}", entropy, curve))
    for name, of_cluster in list(records.items())[1:]:
        curve = [(each["step"], each["loss"]) for each in of_cluster if "loss" in each]
        curves.append((name, found.get(name, {}).get("unigram_entropy"), curve))
    return curves


def plot(
    found: Mapping[str, Mapping[str, Any]],
    of_all: Mapping[str, Sequence[dict[str, Any]]],
    path: pathlib.Path,
) -> None:
    """Draws losses of all clusters and RTD AUC by language against steps.

    Args:
      found: cluster -> its summary; the first one has the discriminator.
      of_all: cluster -> its metrics.
      path: of the PNG to write.
    """
    # Imported here, so that clusters, which draw nothing, need not wait for it.
    with installed.extra("plots"):
        import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 8), layout="constrained")
    (losses, rtd_loss), (auc, probed) = figure.subplots(2, 2)
    discriminator = next(iter(of_all))
    records = [record for record in of_all[discriminator] if "loss" in record]
    steps = [record["step"] for record in records]
    values = [record["clm_loss"] for record in records]
    losses.plot(steps, values, label=f"{discriminator} CLM (eq. 10)", color="black")
    rtd_loss.plot(steps, [record["rtd_loss"] for record in records])
    for name, entropy, curve in of_generators(found, of_all):
        (line,) = losses.plot(*zip(*curve, strict=True), label=f"{name} MLM (eq. 6)")
        if entropy is not None:
            losses.axhline(
                entropy, color=line.get_color(), linewidth=0.8, linestyle=":"
            )
    losses.set(
        xlabel="step",
        ylabel="nats per masked token",
        title="Language models (dotted: frequencies alone)",
    )
    losses.legend(fontsize=8)
    rtd_loss.set(xlabel="step", ylabel="nats per token", title="RTD loss (eq. 8)")
    _plot_probes(probed, probes(of_all[discriminator]))

    evaluations = held_out(of_all[discriminator])
    colors = matplotlib.colormaps["tab20"].colors
    languages = list(evaluations[-1]["languages"]) if evaluations else []
    for index, language in enumerate(languages):
        auc.plot(
            [each["step"] for each in evaluations],
            [each["languages"][language]["rtd_auc"] for each in evaluations],
            label=language,
            color=colors[index % len(colors)],
        )
    auc.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    auc.set(
        xlabel="step",
        ylabel="AUC",
        title="RTD on held-out text (0.5: a guess; better fakes lower it)",
    )
    if languages:
        auc.legend(fontsize=7, ncols=3)
    for axes in (losses, rtd_loss, auc, probed):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _plot_probes(axes: Any, found: Sequence[Mapping[str, Any]]) -> None:
    """Draws how near translations lie, and how often the nearest is the right one."""
    labels = {
        "translation_gap": "cosine of translations, less that of others",
        "retrieval": "translations found as the nearest",
    }
    for name, label in labels.items():
        points = [
            (each["step"], mean(each[name].values())) for each in found if name in each
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    if axes.lines:
        axes.legend(fontsize=8)
    axes.set(xlabel="step", title="Translations in the discriminator's encoder")
    axes.set_ylim(bottom=0)


def mean(values: Iterable[float | None]) -> float:
    """Returns the mean of some figures, at least one; NaN if one is null."""
    numbers = [math.nan if each is None else each for each in values]
    return sum(numbers) / len(numbers)
