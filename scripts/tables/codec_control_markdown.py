"""Codecs that a run chooses by itself, beside fixed ones, in Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime import report
from scripts.tables import held_out


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record of `table_codec_control`."""
    ladder = record["ladder"]
    header = [
        *("line", *(f"{name}, s/step" for name in ladder), "auto, s/step"),
        *("/ best", "settles on", "from step", "seconds lost before", "probes"),
        *held_out.HEADER,
    ]
    rows = [_row(row, ladder) for row in record["rows"]]
    return report.join(
        report.heading(record, report.seeds(record), " of runs with `auto`"),
        _line(record),
        f"A probe every {record['every']} steps; more often while the run seeks. Means"
        " over seeds. Lost before: the seconds of a run, or of its part after the line"
        " changed, above those of as many steps once it has settled. Probes: their"
        " share of the settled steps' time.",
        held_out.explanation(
            record["rows"], "the fixed codec that is the fastest on the line"
        ),
        report.table(header, rows, "l" + "r" * (len(header) - 1)) if rows else "",
        report.targets(record["targets"]),
    )


def label(row: Mapping[str, Any]) -> str:
    """Returns the name of a row: its line, and its rate if that changes."""
    name = str(row["line"])
    return f"{name}: at {row['rate']:g}" if "then" in name else name


def _line(record: Mapping[str, Any]) -> str:
    line = record["line"]
    if not line:
        return ""
    return (
        f"A step computes for {line['compute_seconds']:.3f} s, {line['factor']:.2f}"
        f" times the paper's; so 60 Mbit/s are `--wan={line['wan']}`, and the others"
        " in proportion."
    )


def _row(row: Mapping[str, Any], ladder: Sequence[str]) -> list[str]:
    found = row["seeds"].values()
    seconds = statistics.fmean(each["seconds"] for each in found)
    return [
        label(row),
        *(report.figure(row["fixed"].get(name), ".3f") for name in ladder),
        f"{seconds:.3f}",
        f"{seconds / row['fixed'][row['best']]:.3f}",
        ", ".join(dict.fromkeys(_codecs(each["rungs"], ladder) for each in found)),
        ", ".join(dict.fromkeys(str(each["from_step"]) for each in found)),
        f"{statistics.fmean(each['seeking'] for each in found):.0f}",
        f"{statistics.fmean(each['probes'] for each in found):.1%}",
        *held_out.cells(row),
    ]


def _codecs(rungs: Sequence[int], ladder: Sequence[str]) -> str:
    names = dict.fromkeys(ladder[rung] for rung in rungs)
    return " forward, ".join(names) + (" backward" if len(names) > 1 else "")
