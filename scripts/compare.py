"""Runs side by side: what differs in their settings, their figures, their curves.

    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/a runs/b runs/c --out=compare.html

prints a table; the page has the curves as well. A run may still be under way.
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import page, plots, report, run_folder
from nebula_jax.training import metrics

HELD_OUT = "held_out_"


class Read(NamedTuple):
    """A run, as its folder has it."""

    name: str
    summary: Mapping[str, Any]  # empty while the run is under way
    records: Mapping[str, Sequence[Mapping[str, Any]]]  # cluster -> its metrics


def read(folder: pathlib.Path) -> Read:
    """Reads a run's folder; raises errors.SettingsError if it is none."""
    found = run_folder.clusters(folder)
    if not found:
        raise errors.SettingsError(f"{folder}: no cluster of a run has metrics there")
    records = {name: metrics.read(each) for name, each in found.items()}
    return Read(folder.resolve().name, report.read_summary(folder), records)


def markdown(runs: Sequence[Read]) -> str:
    """Renders runs beside each other: settings that differ, then figures."""
    header = ["", *(run.name for run in runs)]
    alignment = "l" + "r" * len(runs)
    flags = [run.summary.get("flags", {}) for run in runs]
    different = [
        [f"--{name}", *(str(each.get(name, "")) for each in flags)]
        for name in dict.fromkeys(name for each in flags for name in each)
        if len({str(each.get(name, "")) for each in flags}) > 1
    ]
    same = "The settings are the same." if any(flags[1:]) else ""
    columns = [figures(run) for run in runs]
    rows = [
        [name, *(each.get(name, report.NOTHING) for each in columns)]
        for name in dict.fromkeys(name for each in columns for name in each)
    ]
    return report.join(
        report.table(header, different, alignment) if different else same,
        report.table(header, rows, alignment),
    )


def figures(run: Read) -> dict[str, str]:
    """Returns the figures of a run: name -> cell."""
    found = {}
    if run.summary:
        found["commit"] = run.summary["commit"]
        found["minutes"] = f"{run.summary['seconds'] / 60:.1f}"
    for cluster, records in run.records.items():
        for name, points in curves(records).items():
            found[f"{cluster}: {name}"] = f"{points[-1][1]:.4f}"
    for each in run.summary.get("clusters", ()):
        name, seconds = each["cluster"], each["seconds"]
        found |= {
            f"{name}: last step": str(each["last_step"]),
            f"{name}: tokens/s": f"{each['tokens_per_second']:,.0f}",
            f"{name}: sent": printable.size(each["bytes_sent"]),
            f"{name}: received": printable.size(each["bytes_received"]),
            f"{name}: waited": f"{each['waited_seconds'] / seconds:.0%}",
        }
    return found


def curves(
    records: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[int, float]]]:
    """Returns name -> (step, value): losses, and means of figures on held-out text."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        values = {name: record[name] for name in metrics.losses(record)}
        for name, value in record.items():
            if name.startswith(HELD_OUT) and value:
                is_each = isinstance(value, Mapping)  # of several languages
                values[name] = statistics.fmean(value.values()) if is_each else value
        for name, value in values.items():
            if not isinstance(value, Mapping):
                found.setdefault(name, []).append((record["step"], value))
    return found


def panels(runs: Sequence[Read]) -> list[plots.Panel]:
    """Returns a panel for each loss and figure, with the curves of all runs."""
    together: dict[str, dict[str, list[tuple[int, float]]]] = {}
    of_line: dict[str, Sequence[Mapping[str, Any]]] = {}
    for run in runs:
        for cluster, records in run.records.items():
            of_line[f"{run.name} {cluster}"] = records
            for name, points in curves(records).items():
                together.setdefault(name, {})[f"{run.name} {cluster}"] = points
    found = [plots.Panel(name, "", each) for name, each in together.items()]
    return found + page.line_panels(of_line)


def _compare(folders: Sequence[pathlib.Path], out: pathlib.Path | None) -> int:
    runs = [read(folder) for folder in folders]
    text = markdown(runs)
    if out is not None:
        title = " beside ".join(run.name for run in runs)
        page.write(out, title, {"": text, "Curves": page.curves(panels(runs))})
    report.show(text)
    if out is not None:
        report.print_paths(out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the runs that the arguments name; returns the exit status."""
    process.replace_unencodable()
    parser = argparse.ArgumentParser(prog="compare", description="Runs side by side.")
    folder = {"type": pathlib.Path, "metavar": "RUN"}
    parser.add_argument("runs", nargs="+", help="folder of a run", **folder)
    parser.add_argument("--out", type=pathlib.Path, help="HTML page to write")
    given = parser.parse_args(argv)
    return process.guarded(lambda: _compare(given.runs, given.out))


if __name__ == "__main__":
    sys.exit(main())
