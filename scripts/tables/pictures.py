"""The pictures of tables, from their records."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax import installed
from scripts.tables import compression_rows, held_out

with installed.extra("plots"):
    import matplotlib.figure

SIZE = (10, 4.2)
COLORS = 10  # that matplotlib has, then they begin anew
STYLES = ("-", "--", ":")


def table3(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 8 beside the record: NAME_fig8.png."""
    figure8(record["moved"], out.with_name(f"{out.stem}_fig8.png"))


def table5(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 9 beside the record, and Fig. 10 where it has that."""
    figure9(record["rows"], out.with_name(f"{out.stem}_fig9.png"))
    if record["starts"]:
        figure10(record, out.with_name(f"{out.stem}_fig10.png"))


def figure8(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws Fig. 8: the losses of a run that moved, over those of one that did not.

    Args:
      record: `curve` and `never_moved`, records of steps with their `cluster`.
      path: of the PNG.
    """
    figure = matplotlib.figure.Figure(figsize=SIZE, layout="constrained")
    losses = {"rtd_loss": "RTD loss (eq. 8)", "clm_loss": "CLM loss (eq. 10)"}
    for axes, (name, title) in zip(figure.subplots(1, 2), losses.items(), strict=True):
        curve = record["never_moved"]
        axes.plot(
            [each["step"] for each in curve],
            [each[name] for each in curve],
            color="black",
            linewidth=3.5,
            alpha=0.25,
            label="in one process to the end",
        )
        for cluster, label in (
            ("whole", "begun in one process"),
            ("discriminator", "gone on over two clusters"),
        ):
            part = [each for each in record["curve"] if each["cluster"] == cluster]
            axes.plot(
                [each["step"] for each in part],
                [each[name] for each in part],
                label=label,
                linewidth=1.2,
            )
        axes.set(xlabel="step", ylabel="nats", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def figure9(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the training loss of each row, mean of the seeds: the paper's left."""
    figure = matplotlib.figure.Figure(figsize=(11, 5.8), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    plain = [row for row in rows if row["name"] == "baseline"]
    for axes, is_ours in zip(both, (False, True), strict=True):
        others = [row for row in rows if row["is_ours"] == is_ours and row not in plain]
        for row in plain:
            curve = mean_curve(row["losses"])
            axes.plot(*curve, label=row["name"], color="black", zorder=3, linewidth=1.2)
        for number, row in enumerate(others):
            axes.plot(
                *mean_curve(row["losses"]),
                label=row["name"],
                color=f"C{number % COLORS}",
                linestyle=STYLES[number // COLORS % len(STYLES)],
                linewidth=1.2,
            )
        axes.set(xlabel="step", title="our rows" if is_ours else "the paper's rows")
        axes.grid(alpha=0.3)
        if axes.lines:  # below the axes, where no curve is
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
            axes.legend(fontsize=7, ncols=2, **below)
    both[0].set_ylabel("nats per target token")
    figure.savefig(path, dpi=110)


def figure10(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws BLEU against the step at which FP16(SVD(0.6))+INT8 begins."""
    by_name = {row["name"]: row for row in record["rows"]}
    starts = {1: by_name[compression_rows.START_ROW]}
    starts |= {each["step"]: each for each in record["starts"]}
    rows = dict(sorted(starts.items()))
    *bleus, plain = held_out.bleus([*rows.values(), by_name["baseline"]])
    figure = matplotlib.figure.Figure(figsize=SIZE, layout="constrained")
    score, loss = figure.subplots(1, 2)
    score.plot([*rows], [statistics.fmean(each) for each in bleus], marker="o")
    for step, each in zip(rows, bleus, strict=True):
        score.plot([step] * len(each), each, "x", color="grey", markersize=5)
    mean = statistics.fmean(plain)
    score.axhline(mean, color="black", linestyle="--", label="baseline")
    score.set(
        xlabel="first compressed step", ylabel="BLEU", title="BLEU (crosses: seeds)"
    )
    for step, row in rows.items():
        loss.plot(*mean_curve(row["losses"]), label=f"from step {step}")
    loss.set(xlabel="step", ylabel="nats per target token", title="Training loss")
    for axes in (score, loss):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def mean_curve(losses: Sequence[Sequence[Sequence[float]]]) -> tuple[list, list]:
    """Averages [[step, loss], ...] over seeds: steps, mean losses."""
    steps = [step for step, _ in losses[0]]
    values = [[loss for _, loss in seed] for seed in losses]
    return steps, [statistics.fmean(each) for each in zip(*values, strict=True)]
