"""Records of finished runs: their provenance, and their Markdown.

A record is a dict that becomes a JSON file. A pure function of it makes its Markdown,
the same in a terminal (`show`) and in a file.
"""

import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.markdown

import nebula_jax
from nebula_jax import files, installed, printable, strict_json
from nebula_jax.runtime.life import process

NOTHING = "–"  # the cell of a figure that was not measured
VERDICTS = {True: "met", False: "**not met**", None: "too noisy to decide"}
"""The cell of a target: met, not met, or not decided."""


def provenance(
    seconds: float, *, commits: Iterable[str] = (), seeds: Sequence[str] = ()
) -> dict[str, Any]:
    """Describes how a record's figures came to be.

    Returns the command, commit, hardware, the `seconds` of wall time that were
    measured, and perhaps seeds: a record's first entries. Commits and seeds are of the
    runs that it is made of; the commit is this checkout's if there are none.
    """
    found = {
        "command": command(),
        "commit": ", ".join(dict.fromkeys(commits)) or commit(),
        "hardware": hardware(),
        "seconds": round(seconds, 1),
    }
    return found | ({"seeds": list(seeds)} if seeds else {})


def command() -> str:
    """Returns the command that started this process, as a person would type it."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:  # a program of the user's own
        return shlex.join(["python", *sys.argv])
    runs = ["nebula"] if installed.IS_WHEEL else ["python", "-m"]
    return shlex.join([*runs, spec.name.removesuffix(".__main__"), *sys.argv[1:]])


def commit() -> str:
    """Returns the commit of this checkout, with + if files differ; or `unknown`.

    Where there is no checkout, it is the version that pip installed.
    Results do not count: a run does not differ because another one has ended.
    """
    if installed.IS_WHEEL:  # git would find the repository of whose .venv it is
        return f"nebula_jax {nebula_jax.__version__}"
    git = ["git", "-C", str(installed.FOLDER)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!experiments/results"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    name = head.stdout.strip()
    return name + ("+" if dirty.stdout.strip() else "") if name else "unknown"


def hardware() -> dict[str, Any]:
    """Returns the machine's processor, cores and devices, and the versions in use."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "devices": str(jax.devices()[0].device_kind),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def read_summary(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the summary.json of a cluster or a run; {} if there is none."""
    path = folder / "summary.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def print_paths(*paths: pathlib.Path) -> None:
    """Prints where a run's report is: those of the files that were written."""
    written = [str(each) for each in paths if each.is_file()]
    process.progress("report: " + ", ".join(written), {"report": written})


def first_and_last(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns first, first_step, last, last_step of the losses; {} if there is none."""
    steps = [record for record in records if "loss" in record]
    if not steps:
        return {}
    return {
        "first": steps[0]["loss"],
        "first_step": steps[0]["step"],
        "last": steps[-1]["loss"],
        "last_step": steps[-1]["step"],
    }


def write(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON, whole or not at all; null where a number is NaN."""
    text = strict_json.dumps(record, indent=1, ensure_ascii=False)
    with files.writing(path) as partial:
        partial.write_text(text + "\n", "utf-8")


def is_stale(path: pathlib.Path, folders: Iterable[pathlib.Path]) -> bool:
    """Returns True if a run's summary is missing or older than a cluster's."""
    if not path.is_file():
        return True
    summaries = [folder / "summary.json" for folder in folders]
    times = [each.stat().st_mtime for each in summaries if each.is_file()]
    return path.stat().st_mtime < max(times, default=0)


def wall_seconds(command: float, clusters: Iterable[Mapping[str, Any]]) -> float:
    """Returns a command's seconds, or training's if an earlier one has trained."""
    return max([command, *(each["seconds"] for each in clusters if each)])


def outages(clusters: Iterable[Mapping[str, Any]]) -> str:
    """Renders how often clusters were cut off, for how long, and what waited."""
    found = []
    for each in clusters:
        lost = each.get("outages", {})
        if not lost.get("count") and not lost.get("tensors"):
            continue
        count, tensors = lost["count"], lost["tensors"]
        size = printable.size(lost["bytes"])
        found.append(
            f"{each['cluster']} lost its line {count} time{'s' * (count != 1)}, for"
            f" {lost['seconds']:.1f} s in all. At most {tensors}"
            f" tensor{'s' * (tensors != 1)} of {size} waited for it."
        )
    return join(*found) if found else ""


def join(*paragraphs: str) -> str:
    """Joins paragraphs, code and tables to a Markdown text; empty ones are left out."""
    return "\n\n".join(each.rstrip("\n") for each in paragraphs if each) + "\n"


def figure(value: float | None, form: str) -> str:
    """Formats a number of a record; one that was not finite is null there."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:{form}}"


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], alignment: str = ""
) -> str:
    """Renders a Markdown table.

    >>> print(table(["codec", "bytes"], [["fp16|zstd", "12"]]))
    | codec | bytes |
    |---|---:|
    | fp16\\|zstd | 12 |

    Args:
      rows: their cells. In a cell, `|` is a character like any other.
      alignment: a letter for each column, l(eft) or r(ight). By default only the first
        column is left-aligned.
    """
    alignment = alignment or "l" + "r" * (len(header) - 1)
    rule = "|".join("---" if letter == "l" else "---:" for letter in alignment)
    lines = [_row(header), f"|{rule}|", *(_row(cells) for cells in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return "".join(f"| {cell} " if cell else "| " for cell in escaped) + "|"


def heading(record: Mapping[str, Any], detail: str, more: str = "") -> str:
    """Renders provenance; `detail` follows the commits, `more` the minutes."""
    machine, commits = record["hardware"], record["commit"]
    return (
        f"    {record['command']}\n\n"
        f"Commit{'s' * (', ' in commits)} {commits}, {detail}, {machine['cores']} cores"
        f" of {machine['cpu']}, Python {machine['python']}, jax {machine['jax']};"
        f" {record['seconds'] / 60:.1f} minutes{more}."
    )


def seeds(record: Mapping[str, Any]) -> str:
    """Renders the seeds of a record of several runs, as a detail of its `heading`."""
    names = record["seeds"]
    return f"seed{'s' * (len(names) > 1)} {', '.join(names)}"


def clusters(summary: Mapping[str, Any]) -> str:
    """Renders a run's clusters as a table: steps, loss, speed, bytes, waiting.

    The summary's `clusters` are those of its clusters, `losses` their `first_and_last`.
    """
    rows = []
    for each in summary["clusters"]:
        steps, losses = str(each["last_step"]), summary["losses"][each["cluster"]]
        if each["first_step"] > 1:  # it was resumed
            steps = f"{each['first_step']}-{steps}"
        curve = NOTHING  # a cluster may have no loss of its own
        if losses and (losses["first"] or losses["last"]):
            curve = " → ".join(
                figure(losses[name], ".3f") for name in ("first", "last")
            )
        rows.append(
            [
                each["cluster"],
                steps,
                curve,
                figure(each["tokens_per_second"] or None, ",.0f"),
                printable.size(each["bytes_sent"]),
                printable.size(each["bytes_received"]),
                f"{each['waited_seconds'] / each['seconds']:.0%}",
            ]
        )
    header = ["cluster", "steps", "loss", "tokens/s", "sent", "received", "waited"]
    text = table(header, rows)
    if any(each["first_step"] > 1 for each in summary["clusters"]):
        text += "\n\nLosses begin with the run, all other figures where it was resumed."
    return text


def missing(summary: Mapping[str, Any]) -> str:
    """Renders which clusters, as after a full disk, have no figures of their end."""
    ends = {each["cluster"]: each["last_step"] for each in summary["clusters"]}
    last = max(ends.values(), default=0)
    names = [name for name in summary["losses"] if ends.get(name) != last]
    if not ends or not names:
        return ""
    return (
        f"No figures of the run's end, at step {last}, were written by"
        f" {', '.join(names)}: sums are without them, or with those of an earlier stop."
    )


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    """Returns a target for `targets`: a value that should not be below a limit."""
    return {"what": what, "value": value, "at_least": limit, "met": value >= limit}


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    """Returns a target for `targets`: a value that should not be above a limit."""
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit}


def targets(found: Sequence[Mapping[str, Any]]) -> str:
    """Renders targets beside what was measured; empty if there are none.

    Each has `what`, `value`, `at_least` or `at_most`, and `met`, which is None where
    the measurement was too noisy to decide.
    """
    rows = [
        [
            each["what"],
            f"{each['value']:.3f}",
            f"≥ {each['at_least']:.3g}"
            if "at_least" in each
            else f"≤ {each['at_most']:.3g}",
            VERDICTS[each["met"]],
        ]
        for each in found
    ]
    header = ["target", "measured", "limit", "verdict"]
    return table(header, rows, "lrrl") if rows else ""


def show(markdown: str) -> None:
    """Prints Markdown, rendered in a terminal; never fails: files have it already."""
    with process.for_people():
        if process.is_json():  # who reads that has the files
            return
        if sys.stdout.isatty():
            console = rich.console.Console(highlight=False)
            console.print(rich.markdown.Markdown(markdown))
        else:
            print(markdown, end="", flush=True)
