"""All clusters of a run on one page of the terminal, live: `nebula top runs/NAME`.

It reads what the clusters write into the run's folder, and nothing else: where some of
them run elsewhere, these have their own page there, and here the share of the time in
which they were waited for.
"""

import argparse
import contextlib
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.live
import rich.table

from nebula_jax import errors
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.security import names
from nebula_jax.training import metrics

COLUMNS = (
    ("cluster", "left"),
    ("step", "right"),
    ("done", "right"),
    ("left", "right"),
    ("losses", "left"),
    ("speed", "right"),
    ("sends Mbit/s", "right"),
    ("gets Mbit/s", "right"),
    ("round trip", "right"),
    ("waited", "left"),
    ("last heard", "right"),
)


def table(workdir: pathlib.Path, now: float) -> rich.table.Table:
    """Returns the page of a run, `now` in seconds since the epoch."""
    made = rich.table.Table(title=str(workdir))
    for name, justify in COLUMNS:
        made.add_column(name, justify=justify)
    found = run_folder.clusters(workdir)
    newest = {name: metrics.newest(folder) for name, folder in found.items()}
    peers = {
        names.label(peer): peer
        for record in newest.values()
        for peer in record.get("waiting_for", ())
    }
    for name, record in newest.items():
        last = report.read_summary(found[name]).get("last_step")
        shown = peers.pop(found[name].name, name)
        made.add_row(*cells(shown, record, now, is_done=last == record.get("step", -1)))
    for peer in peers.values():
        made.add_row(peer, *[""] * (len(COLUMNS) - 2), "elsewhere")
    return made


def cells(name: str, record: Mapping[str, Any], now: float, is_done: bool) -> list[str]:
    """Returns a cluster's row: its newest record, {} before the first one."""
    if not record:
        return [name, *[""] * (len(COLUMNS) - 2), "no step yet"]
    step, left = record["step"], record.get("steps_left")
    trips = record.get("round_trip", {})
    share = f"{step / (step + left):.0%}" if left is not None else ""
    in_losses = (f"{each} {record[each]:.4f}" for each in metrics.losses(record))
    age = now - record["time"]
    ended = ("stopped" if left else "done") if is_done else ""
    return [
        name,
        f"{step:,}",
        share,
        metrics.in_time(record["seconds_left"]) if left else "",
        "  ".join(in_losses),
        metrics.speed(record),
        f"{record.get('sent_mbit', 0.0):.1f}",
        f"{record.get('received_mbit', 0.0):.1f}",
        f"{1000 * max(trips.values()):.0f} ms" if trips else "",
        f"{record.get('waiting_share', 0.0):.0%}{metrics.waited_for(record)}",
        ended or f"{metrics.in_time(max(0.0, age))} ago",
    ]


def _show(workdir: pathlib.Path, every: float) -> int:
    """Shows the page until Ctrl-C; once where no terminal is."""
    if not workdir.is_dir():
        raise errors.SettingsError(f"{workdir}: no run is there")
    console = rich.console.Console()
    if not console.is_terminal:
        rich.console.Console(width=200).print(table(workdir, time.time()))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        rich.live.Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            live.update(table(workdir, time.time()), refresh=True)
            time.sleep(every)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the run that the argument names; returns the exit status."""
    process.replace_unencodable()
    parser = argparse.ArgumentParser(
        prog="top", description="All clusters of a run on one page, live."
    )
    parser.add_argument("run", type=pathlib.Path, help="folder of a run", metavar="RUN")
    parser.add_argument("--every", type=float, default=1.0, help="seconds")
    given = parser.parse_args(argv)
    return process.guarded(lambda: _show(given.run, given.every))


if __name__ == "__main__":
    sys.exit(main())
