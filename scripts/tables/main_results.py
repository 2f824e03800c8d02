"""Tables of the records' figures, for README.md and for `which_codec.md`."""

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from experiments.m3 import report as m3_report
from nebula_jax.runtime.records import report
from scripts.tables import abnet, held_out, sweep

Record = Mapping[str, Any]
FASTER = 170 / 60  # the paper's other line beside the one of the measured steps
CUT = ("codec", "MB a step", "loss", "BLEU", "steps/s", "170 Mbit/s")
LOCAL = ("exchange", "clusters", "bytes a token", "times fewer", "loss")
HEADER = ("what", "result", "spread, or cost", "seeds", "page")
NARROW = "bottleneck of 208 by token and zstd"
"""Of Table 5's rows with 25 times fewer bytes, the one whose record has most seeds."""

Figures = tuple[str, str, int | None]  # a result; its interval or cost; seeds, if any


def _auc(record: Record) -> Figures:
    last = record["held_out"][-1]
    found = [each["rtd_auc"] for each in last["languages"].values()]
    mean = m3_report.mean_of(last, "rtd_auc")
    return f"AUC {mean:.2f}", f"{min(found):.2f} to {max(found):.2f} by language", 1


def _points(row: str, other: str) -> Callable[[Record], Figures]:
    """Returns what renders by how much a row's accuracy is above another one's."""

    def figures(record: Record) -> Figures:
        (found,) = (each for each in record["rows"] if each["name"] == row)
        apart = found["against"][other]["all"]
        low, high = (100 * edge for edge in apart["interval"])
        result = f"{100 * apart['mean']:+.1f} points"
        return result, f"{low:+.1f} to {high:+.1f}", found["seeds"]

    return figures


def _cloud(record: Record) -> Figures:
    (row,) = (row for row in record["rows"] if row["method"] == "ABNet-Cloud")
    (pair,) = (each for each in row["pairs"] if each["pair"] == "es-en")
    apart = pair["held_out"]["bleu_difference"]
    interval = f"{apart['low']:+.2f} to {apart['high']:+.2f}"
    seeds = len(pair["held_out"]["bleu"])
    return f"{apart['difference']:+.2f} BLEU", interval, seeds


def _over_line(record: Record) -> Figures:
    rows = {row["kind"]: row for row in record["rows"]}
    here, across = (rows[name] for name in ("one cluster", "two clusters"))
    seconds = zip(here["step_seconds"], across["step_seconds"], strict=True)
    ratios = [before / after for before, after in seconds]
    same = "the same" if all(row["is_identical"] for row in rows.values()) else "other"
    speed = f"{statistics.median(ratios):.2f} of the speed"
    return speed, f"{same} parameters, bit for bit", len(ratios)


def _codec(name: str, gain: Callable[[Record, Record], str]) -> Any:
    """Returns what renders a row of Table 5: what it gains, and its held-out loss."""

    def figures(record: Record) -> Figures:
        (row,) = (row for row in record["rows"] if row["name"] == name)
        apart = row["held_out"]["difference"]
        loss = f"loss {held_out.with_error(apart, '+.3f')} nats"
        return gain(record, row), loss, len(apart)

    return figures


def _faster(record: Record, row: Record) -> str:
    (plain,) = (row for row in record["rows"] if row["name"] == "baseline")
    ratio = plain["speed"]["seconds"] / row["speed"]["seconds"]
    return f"{ratio:.1f} times the steps a second"


def _fewer(record: Record, row: Record) -> str:
    sent = max(abnet.step_bytes(row).values())
    return f"{record['padded_bytes'] / sent:.0f} times fewer bytes"


def _local_steps(record: Record) -> Figures:
    (row,) = (row for row in record["rows"] if row["key"] == "streaming2")
    apart = row["difference"]
    loss = sweep.mean_and_error(apart["mean"], apart["standard_error"], "+.1%")
    fewer = f"{row['bytes']['fewer']:.0f} times fewer bytes"
    return fewer, f"loss {loss}", apart["seeds"]


def _bridge(record: Record) -> Figures:
    values = {each["what"]: each["value"] for each in record["targets"]}
    share = values["bridge_tls: 25 MB, throughput / tls"]
    trip = record["transports"]["bridge_tls"]["round trip"]["p50_microseconds"]
    cost = f"{trip['median']:.0f} µs a round trip"
    return f"{share:.2f} of the throughput", cost, None


def _beside_peers(model: str, ours: str) -> Callable[[Record], Figures]:
    """Returns what renders the seconds of other frameworks' rounds over ours."""

    def figures(record: Record) -> Figures:
        wanted = model, "60 Mbit/s"
        rows = {
            row["arm"]: row
            for row in record["rows"]
            if (row["model"], row["line"]) == wanted and "round" in row
        }
        own = rows[ours]
        others = [row for arm, row in rows.items() if not arm.startswith("Nebula")]
        times = [
            f"{row['round'] / own['round']:.1f} {row['arm'].rpartition(' ')[0]}"
            for row in sorted(others, key=lambda row: row["round"])
        ]
        fewer = [row["bytes"] / own["bytes"] for row in others]
        span = " to ".join(dict.fromkeys(f"{f(fewer):.0f}" for f in (min, max)))
        return ", ".join(times), f"{span} times fewer bytes", None

    return figures


_MLM = "masked language modeling went on"
_CLS = "M3, [CLS] pooling", "masked language modeling, [CLS] pooling"
ROWS = (  # record -> the subject of a row, and what renders its figures
    (
        "m3_xnli15_tiny",
        "M3 from scratch: fakes found in 15 languages (a guess has 0.5)",
        _auc,
    ),
    (
        "table1_six",
        "XNLI after M3, above masked language modeling as long",
        _points("M3", _MLM),
    ),
    ("table1_six", "the same, if sentences are read by [CLS]", _points(*_CLS)),
    (
        "table1_twelve",
        "XNLI after M3 of twelve layers, above the encoder as it comes",
        _points("M3", "as it comes"),
    ),
    ("table2_tiny", "ABNet in two clusters (int8) above one process, es-en", _cloud),
    (
        "table3",
        "M3 across 170 Mbit/s beside no line (1: the line is hidden; paper: 0.85)",
        _over_line,
    ),
    (
        "table5_bottleneck",
        "4-bit numbers both ways on a slow line, beside float32",
        _codec("int4 both ways", _faster),
    ),
    (
        "table5_bottleneck",
        "208 of 384 columns across the cut, at 4 bits",
        _codec(NARROW, _fewer),
    ),
    ("local_steps", "BERT in two clusters beside an all-reduce a step", _local_steps),
    (
        "bench_peers",
        "local steps, 22 M parameters, 60 Mbit/s: others' seconds / ours of 4 bits",
        _beside_peers("22 M", "Nebula mesh e3m0"),
    ),
    (
        "bench_peers",
        "a model cut in two, 60 Mbit/s: others' seconds / ours of 4 bits",
        _beside_peers("the cut", "Nebula int4"),
    ),
    ("bench_bridge", "the bridge beside bare TLS sockets, 25 MB tensors", _bridge),
)


def markdown(results: pathlib.Path) -> str:
    """Renders one row for each of ROWS."""
    cells = []
    for name, what, figures in ROWS:
        record = json.loads((results / f"{name}.json").read_text("utf-8"))
        result, interval, seeds = figures(record)
        link = f"[{name}](experiments/results/{name}.md)"
        cells.append([what, result, interval, str(seeds or ""), link])
    return report.join(report.table(HEADER, cells, "lllrl"))


def which_codec(results: pathlib.Path) -> str:
    """Renders the table of a cut model and that of local steps."""
    cut, local = (
        json.loads((results / f"{name}.json").read_text("utf-8"))
        for name in ("table5_bottleneck", "local_steps")
    )
    # Modes that are withdrawn have rows in the records still.
    rows = [
        row
        for row in cut["rows"]
        if not row["staleness"] and "," not in row["bottleneck"]
    ]
    several = [
        row
        for row in local["rows"]
        if row.get("bytes") and row["difference"]["seeds"] > 1
    ]
    return report.join(
        report.table(CUT, [_cut_row(cut, row) for row in rows], "lrrrrr"),
        report.table(LOCAL, [_local_row(row) for row in several], "lrrrr"),
    )


def _cut_row(record: Record, row: Record) -> list[str]:
    speed, found = row["speed"], row["held_out"]
    sent = speed["forward"], speed["backward"]
    seconds = 8 * max(sent) / (record["line"]["rate"] * FASTER)
    most = 1 / max(seconds, record["line"]["compute_seconds"])
    codecs = dict.fromkeys([row["forward"], row["backward"]])
    name = " / ".join(f"`{each}`" for each in codecs)
    if row["bottleneck"]:
        name = f"`--bottleneck={row['bottleneck']}` {name}"
    bleu = found.get("bleu_difference", {}).get("difference")
    return [
        name,
        f"{sum(sent) / 1e6:.3f}",
        held_out.with_error(found.get("difference", {}), "+.3f"),
        "" if bleu is None else f"{bleu:+.2f}",
        f"{1 / speed['seconds']:.2f}",
        f"{most:.2f}",
    ]


def _local_row(row: Record) -> list[str]:
    sent, apart = row["bytes"], row["difference"]
    return [
        row["name"],
        str(row["clusters"]),
        f"{sent['per_token']:.2f}",
        f"{sent['fewer']:.0f}",
        sweep.mean_and_error(apart["mean"], apart["standard_error"], "+.1%"),
    ]
