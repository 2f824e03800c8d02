"""A picture of Table 5: quality on held-out pairs against the bytes that cross."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import installed
from scripts.tables import abnet as abnet_runs
from scripts.tables import compression_rows

with installed.extra("plots"):
    import matplotlib.figure

LABEL_AT = (4, 4)
"""The beginning of a point's name, in typographic points from it."""
AWAY = (-80, 32)
"""That of a name in the midst of curves: up, or down from the lower points."""


class Method(NamedTuple):
    """The rows of one kind, in the picture of quality against bytes."""

    label: str
    marker: str
    is_curve: bool
    points: list[dict[str, Any]]
    is_amid: bool = False
    """True if the points are in the midst of curves."""


def points(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows that are compared on held-out pairs, and how few they send.

    Args:
      result: record of Table 5.

    Returns:
      Rows of the record with `fewer`: times fewer bytes both ways than padded float32.
    """
    return [
        row | {"fewer": _fewer(row, result)}
        for row in result["rows"]
        if "speed" in row
        and row.get("held_out", {}).get("difference")
        # Rows of withdrawn modes, which records still have.
        and not (row.get("staleness") or "ranks" in row)
    ]


def _fewer(row: Mapping[str, Any], result: Mapping[str, Any]) -> float:
    return 2 * result["padded_bytes"] / sum(abnet_runs.step_bytes(row).values())


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws held-out loss and BLEU, beside the baseline, against bytes.

    Args:
      result: record of Table 5, with `points`.
      path: of the PNG.
    """
    rows = points(result)
    bottlenecks = [row for row in rows if row.get("bottleneck")]
    packed = [row for row in bottlenecks if row["forward"] == compression_rows.BY_TOKEN]
    narrow = [row for row in bottlenecks if row["forward"] == compression_rows.NARROW]
    others = [row for row in rows if row["is_ours"] and not row.get("bottleneck")]
    methods = (
        Method("the paper's", "s", False, [row for row in rows if not row["is_ours"]]),
        Method("ours, all columns", "o", False, others),
        Method("a bottleneck, a run for each rank", "D", True, narrow),
        Method("a bottleneck, a scale for each token, zstd", "*", False, packed, True),
    )
    figure = matplotlib.figure.Figure(figsize=(13, 5.6), layout="constrained")
    loss, score = figure.subplots(1, 2)
    loss.set_yscale("symlog", linthresh=0.01)  # before points, which need margins
    for method in methods:
        if method.points:
            _plot(loss, method, _losses(method.points))
            _plot(score, method, _bleus(method.points))
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


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """Returns each row's mean difference of the loss, and its error down and up."""
    found = []
    for row in rows:
        seeds = list(row["held_out"]["difference"].values())
        error = statistics.stdev(seeds) / len(seeds) ** 0.5 if seeds[1:] else 0.0
        found.append((statistics.fmean(seeds), error, error))
    return found


def _bleus(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """Returns each row's difference of BLEU, and its interval down and up."""
    found = (row["held_out"]["bleu_difference"] for row in rows)
    return [
        (
            each["difference"],
            each["difference"] - each["low"],
            each["high"] - each["difference"],
        )
        for each in found
    ]


def _plot(
    axes: Any, method: Method, values: Sequence[tuple[float, float, float]]
) -> None:
    """Draws a method's points with their errors and names."""
    heights, down, up = zip(*values, strict=True)
    axes.errorbar(
        [row["fewer"] for row in method.points],
        heights,
        [down, up],
        label=method.label,
        marker=method.marker,
        linestyle="-" if method.is_curve else "",
        linewidth=1,
    )
    _name(axes, method, heights)


def _name(axes: Any, method: Method, heights: Sequence[float]) -> None:
    """Writes the names of a method's points, which have these heights."""
    for row, height in zip(method.points, heights, strict=True):
        offset, line = LABEL_AT, None
        if method.is_amid:
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
    """Returns what a row's name has beside the names of others of its method.

    >>> _short("FP16(SVD(0.9))+INT8"), _short("FP16+INT8"), _short("bottleneck of 96")
    ('SVD(0.9)', 'FP16+INT8', '96')
    """
    name = name.removeprefix("FP16(").removesuffix(")+INT8")
    return name.removeprefix("bottleneck of ")
