"""The probes of M3's recipes in Markdown, and the translation gap as a picture."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from nebula_jax.runtime.records import report


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record of `table_m3_recipe`."""
    header = [
        *("recipe", "translation gap, first → last", "kept", "retrieval"),
        *("gradient in the encoder, RTD, CLM", "RTD AUC", "sampled right"),
        *("CLM right (most frequent)", "generators' loss (unigrams)", "minutes"),
    ]
    rows = [_row(row, record["kept"]) for row in record["rows"]]
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        report.table(header, rows, "l" + "r" * (len(header) - 1)),
        f"After {record['steps']} steps; gradients of the first probe that has any →"
        f" the last, weighted as in the loss. Kept: at least {record['kept']:.0%} of"
        " the start's gap, the rule by which a recipe may be chosen.",
    )


def _row(row: Mapping[str, Any], kept: float) -> list[str]:
    shares, gaps = _shares(row), [gap for _, gap in row["gaps"]]
    share = f"{shares[-1]:.0%}{'' if shares[-1] >= kept else ' (no)'}"
    gradients = [
        " → ".join(report.figure(value, ".2g") for value in row["gradients"][name])
        for name in ("rtd_encoder", "clm_encoder")
    ]
    losses = [
        f"{report.figure(each['loss'], '.2f')}"
        f" ({report.figure(each['unigram_entropy'], '.2f')})"
        for each in row["generators"]
    ]
    return [
        row["name"],
        " → ".join(report.figure(gaps[end], ".3f") for end in (0, -1)),
        report.NOTHING if math.isnan(shares[-1]) else share,
        " → ".join(report.figure(value, ".0%") for value in row["retrieval"]),
        ", ".join(gradients),
        report.figure(row["rtd_auc"], ".3f"),
        report.figure(row["sampled_mlm_accuracy"], ".1%"),
        f"{report.figure(row['clm_accuracy'], '.1%')}"
        f" ({report.figure(row['unigram_accuracy'], '.1%')})",
        ", ".join(losses),
        f"{row['seconds'] / 60:.0f}",
    ]


def _shares(row: Mapping[str, Any]) -> list[float]:
    """Returns each gap as a share of the first one; NaN where one was not finite."""
    gaps = [math.nan if gap is None else gap for _, gap in row["gaps"]]
    return [gap / gaps[0] if gaps[0] else math.nan for gap in gaps]


def picture(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the share of the translation gap that is left, a curve a recipe.

    Args:
      record: of the table.
      path: of the PNG to write.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab10"].colors
    for number, row in enumerate(record["rows"]):
        steps, left = [step for step, _ in row["gaps"]], _shares(row)
        color = colors[number % len(colors)]
        axes.plot(steps, left, marker="o", markersize=3, label=row["name"], color=color)
    axes.axhline(record["kept"], color="black", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="step",
        ylabel="translation gap, as a share of the start's",
        title="What M3 leaves of a pretrained encoder (dotted: the rule)",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
