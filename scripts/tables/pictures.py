"""The pictures of tables, from their records."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report
from scripts.tables import compression_rows, held_out


def table3(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 8 beside the record: NAME_fig8.png."""
    figure8(record["moved"], out.with_name(f"{out.stem}_fig8.png"))


def table5(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 9 beside the record, and Fig. 10 where it has that."""
    figure9(record["rows"], out.with_name(f"{out.stem}_fig9.png"))
    if record["starts"]:
        figure10(record, out.with_name(f"{out.stem}_fig10.png"))


def figure8(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws Fig. 8: the losses of a run that moved, and those of one that did not.

    Args:
      record: `curve` and `never_moved`, records of steps with their `cluster`.
      path: of the PNG.
    """
    parts = {"in one process to the end": record["never_moved"]}
    for cluster, label in (
        ("whole", "begun in one process"),
        ("discriminator", "gone on over two clusters"),
    ):
        parts[label] = [each for each in record["curve"] if each["cluster"] == cluster]
    panels = [
        report.Panel(
            title,
            "nats",
            {
                label: [(each["step"], each[name]) for each in part]
                for label, part in parts.items()
            },
        )
        for name, title in (
            ("rtd_loss", "RTD loss (eq. 8)"),
            ("clm_loss", "CLM loss (eq. 10)"),
        )
    ]
    report.draw(panels, path)


def figure9(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the training loss of each row, mean of the seeds: the paper's left."""
    panels = [
        report.Panel(
            title,
            "nats per target token",
            {
                row["name"]: mean_curve(row["losses"])
                for row in rows
                if row["name"] == "baseline" or row["is_ours"] == is_ours
            },
        )
        for title, is_ours in (("the paper's rows", False), ("our rows", True))
    ]
    report.draw(panels, path)


def figure10(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws BLEU against the step at which FP16(SVD(0.6))+INT8 begins."""
    by_name = {row["name"]: row for row in record["rows"]}
    starts = {1: by_name[compression_rows.START_ROW]}
    starts |= {each["step"]: each for each in record["starts"]}
    rows = dict(sorted(starts.items()))
    *bleus, plain = held_out.bleus([*rows.values(), by_name["baseline"]])
    means = [statistics.fmean(each) for each in bleus]
    seeds = zip(*bleus, strict=True)
    scores = {"mean": means, **{f"seed {n}": each for n, each in enumerate(seeds)}}
    score = report.Panel(
        "BLEU against the first compressed step; dotted: baseline",
        "BLEU",
        {name: [*zip(rows, each, strict=True)] for name, each in scores.items()},
        {"baseline": statistics.fmean(plain)},
    )
    losses = {
        f"from step {step}": mean_curve(row["losses"]) for step, row in rows.items()
    }
    loss = report.Panel("Training loss", "nats per target token", losses)
    report.draw([score, loss], path)


def mean_curve(
    losses: Sequence[Sequence[Sequence[float]]],
) -> list[tuple[int, float]]:
    """Averages [[step, loss], ...] over seeds: (step, mean loss) points."""
    steps = [int(step) for step, _ in losses[0]]
    values = [[loss for _, loss in seed] for seed in losses]
    means = [statistics.fmean(each) for each in zip(*values, strict=True)]
    return [*zip(steps, means, strict=True)]
