"""The table of local steps in Markdown, and loss against bytes as a picture."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax.runtime.records import report

WITHIN = 0.01
"""The difference of loss that is allowed, relative."""
FEWER = 400
MOST_TIME = 1.02
OTHERS = {"muon": "Muon's", "faster": "that at 3e-3"}
"""Key of a row -> its name beside a difference from it."""
BYTES = 0.01


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""
    rows = [_row(row) for row in record["rows"]]
    header = [
        *("exchange", "clusters", "H, P, τ", "held-out loss", "difference"),
        *("bytes a token", "times fewer", "XNLI en dev"),
    ]
    return report.join(
        report.heading(record, report.seeds(record)),
        f"{record['steps']} steps of {record['batch']} rows in all, whatever the number"
        " of clusters: the same batches in the same order. The loss is that on held-out"
        " text, nats a masked token, mean of the languages and of the seeds;"
        " differences are paired by seed, with their standard error.",
        report.table(header, rows, "llllrrrl"),
        report.targets(targets(record)),
        _time(record),
        _adapters(record.get("adapters")),
    )


def _adapters(found: Mapping[str, float] | None) -> str:
    if not found:
        return ""
    return (
        "Adapters and the head alone, on a frozen e5-small of 12 layers"
        f" (`--trains=adapters_and_head`): {found['parameters']:,} parameters train,"
        f" and {found['bytes_a_step']:,.0f} bytes a step leave each of two clusters,"
        f" {found['fewer']:,.0f} times fewer than an all-reduce of these."
    )


def _row(row: Mapping[str, Any]) -> list[str]:
    losses, sizes = list(row["losses"].values()), row["bytes"]
    is_alone = row["is_all_reduce"]
    schedule = "1" if is_alone else f"{row['inner_steps']}, {row['fragments']}"
    schedule += "" if is_alone else f", {row['delay']}"
    return [
        row["name"],
        str(row["clusters"]),
        schedule,
        f"{statistics.mean(losses):.4f}",
        _difference(row["difference"], row["reference"]),
        "" if is_alone else f"{sizes['per_token']:,.2f}",
        "" if is_alone else f"{sizes['fewer']:,.0f}",
        _spread(row["xnli"]),
    ]


def _difference(found: Mapping[str, float] | None, reference: str) -> str:
    if found is None:
        return ""
    beside = "" if reference == "all_reduce" else f" of {OTHERS[reference]}"
    if found["seeds"] == 1:
        return f"{found['mean']:+.2%}{beside} (1 seed)"
    return f"{found['mean']:+.2%} ± {found['standard_error']:.2%}{beside}"


def _spread(values: Sequence[float]) -> str:
    """Formats accuracies: their mean and standard deviation."""
    if not values:
        return ""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1%} ± {spread:.1%}"


def targets(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what was to be reached, beside what was measured."""
    rows = {row["key"]: row for row in record["rows"]}
    found: list[dict[str, Any]] = []

    def at_most(what: str, value: float, limit: float) -> None:
        met = value <= limit
        found.append({"what": what, "value": value, "at_most": limit, "met": met})

    for key in ("streaming2", "streaming4", "sparse2", "sparse4"):
        if key in rows and rows[key]["difference"]:
            row = rows[key]
            what = f"{row['name']}, {row['clusters']} clusters: loss over all-reduce's"
            at_most(what, 1 + row["difference"]["mean"], 1 + WITHIN)
    for key in ("streaming2", "sparse2"):
        if key not in rows:
            continue
        sizes, name = rows[key]["bytes"], rows[key]["name"]
        found.append(
            {
                "what": f"{name}, 2 clusters: times fewer bytes a token",
                "value": sizes["fewer"],
                "at_least": FEWER,
                "met": sizes["fewer"] >= FEWER,
            }
        )
    time = record["time"]
    if time:
        what = f"bytes over the formula's, as sent over {record['line']}"
        at_most(what, time["sent"] / time["formula"], 1 + BYTES)
        what = f"time of a step at {record['line']} over computing alone"
        at_most(what, time["all"] / time["between"], MOST_TIME)
    one, two = (
        rows.get(key, {}).get("xnli", ()) for key in ("all_reduce", "streaming2")
    )
    if len(one) > 1 and len(two) > 1:
        what = "XNLI English dev, streaming and all-reduce: difference, points"
        spread = max(statistics.stdev(one), statistics.stdev(two))
        apart = abs(statistics.mean(one) - statistics.mean(two))
        at_most(what, 100 * apart, 100 * spread)
    return found


def _time(record: Mapping[str, Any]) -> str:
    time = record["time"]
    if not time:
        return ""
    return (
        f"Two clusters over {record['line']}: {1000 * time['all']:.1f} ms a step,"
        f" {1000 * time['between']:.1f} ms where no round is due."
    )


class Curve(NamedTuple):
    """The loss of a row against the bytes that have crossed."""

    label: str
    style: str
    points: list[tuple[float, float]]
    """(bytes, loss)."""


def curves(record: Mapping[str, Any]) -> list[Curve]:
    """Returns the curves of the picture: an all-reduce for each number of clusters.

    Args:
      record: of the table; `curve` has the first seed's (step, loss).
    """
    rows = [row for row in record["rows"] if not row.get("is_explored")]
    sizes = {row["clusters"]: row["bytes"] for row in rows if not row["is_all_reduce"]}
    found = []
    for row in rows:
        if not row["is_all_reduce"]:
            found.append(_curve(record, row, "-", row["bytes"], "per_token"))
            continue
        for clusters, each in sizes.items():  # it trains alike, whatever their number
            among = {**row, "clusters": clusters}
            found.append(_curve(record, among, "--", each, "all_reduce_per_token"))
    return found


def _curve(
    record: Mapping[str, Any],
    row: Mapping[str, Any],
    style: str,
    sizes: Mapping[str, float],
    name: str,
) -> Curve:
    per_step = sizes[name] * sizes["tokens"] / record["steps"]
    points = [(step * per_step, loss) for step, loss in row["curve"] if step]
    return Curve(f"{row['name']}, {row['clusters']} clusters", style, points)


def picture(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the loss on held-out text against the bytes that have crossed.

    Args:
      record: as for `curves`.
      path: of the PNG to write.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    for each in curves(record):
        points = zip(*each.points, strict=True)
        axes.plot(*points, each.style, marker=".", label=each.label)
    axes.set(
        xscale="log",
        xlabel="bytes that crossed between clusters (of an all-reduce: would have)",
        ylabel="nats per masked token",
        title="Loss on held-out text against bytes (first seed)",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
