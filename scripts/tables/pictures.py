"""The pictures of tables, from their records."""

import json
import pathlib
import statistics
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax import installed
from nebula_jax.runtime.records import plots
from scripts.tables import abnet, compression_rows, held_out, sweep

QUALITY = "quality.svg"  # the picture of README.md
THEIRS, OURS = "cut: the paper's codecs", "cut: no padding, 8 or 4 bits"
NARROW = "cut: so many of 384 columns, at 4 bits"
LOCAL = "local steps, of so many clusters"
STYLE = {  # colors of Okabe and Ito, distinct for the color-blind too
    THEIRS: ("#D55E00", "s"),
    OURS: ("#0072B2", "o"),
    NARROW: ("#007356", "^"),
    LOCAL: ("#A0478A", "D"),
}


class Point(NamedTuple):
    """A way to send less, in the picture of bytes against quality."""

    group: str
    name: str
    fewer: float  # times fewer bytes than padded float32, or than an all-reduce a step
    loss: float  # held-out loss above that of sending all, in %, mean of the seeds
    error: float


def table3(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 8, the losses of a run that moved, beside the record."""
    moved, whole = record["moved"], "in one process to the end"
    parts = {whole: moved["never_moved"]}
    for cluster, label in (
        ("whole", "begun in one process"),
        ("discriminator", "gone on over two clusters"),
    ):
        parts[label] = [each for each in moved["curve"] if each["cluster"] == cluster]
    panels = [
        plots.Panel(
            title,
            "nats",
            {
                label: [(each["step"], each[name]) for each in part]
                for label, part in parts.items()
            },
            under=whole,
        )
        for name, title in (
            ("rtd_loss", "RTD loss (eq. 8)"),
            ("clm_loss", "CLM loss (eq. 10)"),
        )
    ]
    plots.draw(panels, out.with_name(f"{out.stem}_fig8.png"))


def table5(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 9 beside the record, and Fig. 10 where it has that."""
    figure9(record["rows"], out.with_name(f"{out.stem}_fig9.png"))
    if record["starts"]:
        figure10(record, out.with_name(f"{out.stem}_fig10.png"))


def figure9(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the training loss of each row, mean of the seeds: the paper's left."""
    panels = [
        plots.Panel(
            title,
            "nats per target token",
            {
                row["name"]: mean_curve(row["losses"])
                for row in rows
                if row["name"] == "baseline" or row["is_ours"] == is_ours
            },
            under="baseline",
        )
        for title, is_ours in (("the paper's rows", False), ("our rows", True))
    ]
    plots.draw(panels, path)


def figure10(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws BLEU against the step at which FP16(SVD(0.6))+INT8 begins."""
    by_name = {row["name"]: row for row in record["rows"]}
    starts = {1: by_name[compression_rows.START_ROW]}
    starts |= {each["step"]: each for each in record["starts"]}
    rows = dict(sorted(starts.items()))
    *bleus, plain = held_out.bleus([*rows.values(), by_name["baseline"]])
    means = [statistics.fmean(each) for each in bleus]
    errors = [sweep.standard_error(each) for each in bleus if len(each) > 1]
    name = "mean of the seeds"
    score = plots.Panel(
        "BLEU against the first compressed step; dotted: baseline",
        "BLEU",
        {name: [*zip(rows, means, strict=True)]},
        {"baseline": statistics.fmean(plain)},
        errors={name: errors} if errors else {},
    )
    losses = {
        f"from step {step}": mean_curve(row["losses"]) for step, row in rows.items()
    }
    first, unit = next(iter(losses)), "nats per target token"
    loss = plots.Panel("Training loss", unit, losses, under=first)
    plots.draw([score, loss], path)


def mean_curve(
    losses: Sequence[Sequence[Sequence[float]]],
) -> list[tuple[int, float]]:
    """Averages [[step, loss], ...] over seeds: (step, mean loss) points."""
    steps = [int(step) for step, _ in losses[0]]
    values = [[loss for _, loss in seed] for seed in losses]
    means = [statistics.fmean(each) for each in zip(*values, strict=True)]
    return [*zip(steps, means, strict=True)]


def quality_points(results: pathlib.Path) -> list[Point]:
    """Returns what `quality` draws: rows of several seeds that are not withdrawn."""
    cut, local = (
        json.loads((results / f"{name}.json").read_text("utf-8"))
        for name in ("table5_bottleneck", "local_steps")
    )
    known = {row.name for row in compression_rows.rows()}
    plain = cut["rows"][0]["held_out"]["loss"]
    found = []
    for row in cut["rows"][1:]:
        if row["name"] in known:
            apart = row["held_out"]["difference"]
            losses = [100 * apart[seed] / plain[seed] for seed in apart]
            fewer = 2 * cut["padded_bytes"] / sum(abnet.step_bytes(row).values())
            group = NARROW if row["bottleneck"] else OURS if row["is_ours"] else THEIRS
            figures = fewer, statistics.fmean(losses), sweep.standard_error(losses)
            found.append((group, _short(row["name"]), figures))
    for row in local["rows"]:
        apart = row["difference"]
        if row.get("bytes") and apart["seeds"] > 1:
            name = f"{row['name'].partition(',')[0]}, {row['clusters']}"
            loss, error = 100 * apart["mean"], 100 * apart["standard_error"]
            found.append((LOCAL, name, (row["bytes"]["fewer"], loss, error)))
    return [
        Point(group, name, *(round(figure, 3) for figure in figures))
        for group, name, figures in found
    ]


def _short(name: str) -> str:
    """Returns the name of a row of Table 5 as it stands beside its point.

    >>> _short("FP16(SVD(0.8))+INT8"), _short("bottleneck of 208 by token and zstd")
    ('SVD(0.8)', '208, zstd')
    """
    name = name.replace("FP16(SVD", "SVD").replace("))+INT8", ")")
    name = name.replace(" by token and zstd", ", zstd")
    return name.removeprefix("bottleneck of ").removesuffix(" both ways")


def quality(points: Sequence[Point], path: pathlib.Path) -> None:
    """Draws bytes against quality, and keeps the points in the picture's metadata."""
    with installed.extra("plots"):
        import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="0.5", linewidth=1)
    for group, (color, marker) in STYLE.items():
        x, y, errors = np.transpose([each[2:] for each in points if each[0] == group])
        style = {"color": color, "elinewidth": 1, "capsize": 2}
        axes.errorbar(x, y, errors, fmt=marker, label=group, **style)
    ticks = [2, 4, 8, 16, 32, 64, 128, 256, 512]
    axes.set(xscale="log", xlim=(1.7, 900))
    axes.set_xticks(ticks, [str(each) for each in ticks], minor=False)
    axes.minorticks_off()
    axes.set_title(
        "A translator cut in two, and BERT by local steps (bars: standard errors)",
        fontsize=11,
    )
    axes.set_xlabel("times fewer bytes between clusters")
    axes.set_ylabel("held-out loss above sending all, %")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="upper center")
    labels = [
        (each.fewer, each.loss, each.name, STYLE[each.group][0]) for each in points
    ]
    plots.label_points(axes, labels)
    described = {"Date": None, "Description": json.dumps(points)}
    with matplotlib.rc_context({"svg.hashsalt": "nebula"}):
        figure.savefig(path, metadata=described)


def drawn_points(path: pathlib.Path) -> list[Point]:
    """Reads what a picture of `quality` was drawn of; [] if there is none."""
    if not path.is_file():
        return []
    tag = "{http://purl.org/dc/elements/1.1/}description"
    (found,) = xml.etree.ElementTree.parse(path).iter(tag)
    return [Point(*each) for each in json.loads(found.text or "")]
