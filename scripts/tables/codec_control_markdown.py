"""Codecs that a run chooses by itself, beside fixed ones, in Markdown."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report
from scripts.tables import held_out

WAYS = "forward", "backward"


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


def picture(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the codecs of the first seed's runs over their steps, and seconds a step.

    Args:
      record: of the table.
      path: of the PNG to write.
    """
    import matplotlib.figure

    curves, ladder = record["curves"], record["ladder"]
    if not curves:
        return
    figure = matplotlib.figure.Figure(
        figsize=(3.2 * len(curves), 5.0), layout="constrained"
    )
    panels = figure.subplots(2, len(curves), sharex=True, squeeze=False)
    for (rungs, times), curve in zip(panels.T, curves, strict=True):
        steps, seconds, forward, backward = zip(*curve["steps"], strict=True)
        for values, name, style in ((forward, WAYS[0], "-"), (backward, WAYS[1], ":")):
            rungs.step(steps, values, where="mid", label=name, linestyle=style)
        rungs.set_yticks(range(len(ladder)), ladder)
        rungs.set(title=curve["line"], ylim=(-0.3, len(ladder) - 0.7))
        times.plot(steps, seconds, linewidth=0.8, color="black", label="auto")
        times.set(xlabel="step", yscale="log")
        of_line = [row for row in record["rows"] if row["line"] == curve["line"]]
        if len(of_line) == 1:  # of a line that changes there are two of each
            for number, (name, fixed) in enumerate(of_line[0]["fixed"].items()):
                times.axhline(fixed, color=f"C{number}", linewidth=0.8, label=name)
        times.legend(fontsize=7)
        for axes in (rungs, times):
            axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("codec in use")
    panels[0, 0].legend(fontsize=7)
    panels[1, 0].set_ylabel("seconds a step")
    figure.savefig(path, dpi=110)


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
