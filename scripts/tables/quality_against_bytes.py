"""A picture of Table 5: quality on held-out pairs against the bytes that cross."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax import installed
from scripts.tables import abnet as abnet_runs
from scripts.tables import compression_rows

with installed.extra("plots"):
    import matplotlib.figure

LABEL_AT = (4, 4)
"""The beginning of a point's name, in typographic points from it."""
AWAY = (-80, 32)
"""That of a name in the midst of curves: up, or down from the lower points."""


def points(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows that are compared on held-out pairs, and how few they send.

    Args:
      result: record of Table 5.

    Returns:
      Rows of the record with `fewer`: times fewer bytes both ways than padded float32.
    """
    return [
        row
        | {
            "fewer": 2
            * result["padded_bytes"]
            / sum(abnet_runs.step_bytes(row).values())
        }
        for row in result["rows"]
        if row["held_out"].get("difference")
        # Rows of withdrawn modes, which records still have.
        and not (row.get("staleness") or "ranks" in row)
    ]


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws held-out loss and BLEU, beside the baseline, against bytes.

    Args:
      result: record of Table 5, with `points`.
      path: of the PNG.
    """
    kinds = {
        "the paper's": "s",
        "ours, all columns": "o",
        "a bottleneck, a run for each rank": "D-",
        "a bottleneck, a scale for each token, zstd": "*",
    }
    figure = matplotlib.figure.Figure(figsize=(13, 5.6), layout="constrained")
    loss, score = figure.subplots(1, 2)
    loss.set_yscale("symlog", linthresh=0.01)  # before points, which need margins
    for number, (label, style) in enumerate(kinds.items()):
        if rows := [row for row in points(result) if _kind(row) == number]:
            for axes, of in ((loss, _loss), (score, _bleu)):
                _plot(axes, rows, [of(row) for row in rows], label, style)
    for axes in (loss, score):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="times fewer bytes than padded float32, both ways, whole run")
        axes.grid(alpha=0.3, which="both")
        axes.margins(0.12)
    loss.set(
        ylabel="nats a predicted token",
        title="Held-out loss, less the baseline's (bars: standard error over seeds)",
    )
    score.set(
        ylabel="BLEU",
        title="BLEU, less the baseline's (bars: 95 % of a paired bootstrap)",
    )
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)


def _kind(row: Mapping[str, Any]) -> int:
    """Returns the place of a row's kind in the legend."""
    if not row["is_ours"]:
        return 0
    if not row.get("bottleneck"):
        return 1
    return 2 + (row["forward"] == compression_rows.BY_TOKEN)


def _loss(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns a row's mean difference of the loss, and its error down and up."""
    seeds = list(row["held_out"]["difference"].values())
    error = statistics.stdev(seeds) / len(seeds) ** 0.5 if seeds[1:] else 0.0
    return statistics.fmean(seeds), error, error


def _bleu(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns a row's difference of BLEU, and its interval down and up."""
    found = row["held_out"]["bleu_difference"]
    apart = found["difference"]
    return apart, apart - found["low"], found["high"] - apart


def _plot(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    values: Sequence[tuple[float, float, float]],
    label: str,
    style: str,
) -> None:
    """Draws the rows of a kind with their errors and names."""
    heights, down, up = zip(*values, strict=True)
    sizes = [row["fewer"] for row in rows]
    axes.errorbar(sizes, heights, [down, up], label=label, fmt=style, linewidth=1)
    for row, height in zip(rows, heights, strict=True):
        offset, line = LABEL_AT, None
        if style == "*":  # in the midst of curves
            is_upper = height >= statistics.fmean(heights)
            offset = AWAY[0], AWAY[1] if is_upper else -AWAY[1]
            line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0}
        axes.annotate(
            _short(row["name"]),
            (row["fewer"], height),
            xytext=offset,
            textcoords="offset points",
            fontsize=6,
            arrowprops=line,
        )


def _short(name: str) -> str:
    """Returns what a row's name has beside the names of others of its kind.

    >>> _short("FP16(SVD(0.9))+INT8"), _short("FP16+INT8"), _short("bottleneck of 96")
    ('SVD(0.9)', 'FP16+INT8', '96')
    """
    name = name.removeprefix("FP16(").removesuffix(")+INT8")
    return name.removeprefix("bottleneck of ")
