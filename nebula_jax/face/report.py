"""The report of a run whose clusters were all on this machine."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from nebula_jax.runtime.life import process, restarts
from nebula_jax.runtime.records import report as records
from nebula_jax.runtime.records import run_folder, traces
from nebula_jax.training import metrics


def report(
    workdir: pathlib.Path, names: Sequence[str], settings: Any, seconds: float
) -> None:
    """Writes summary.json and the curves of a run, and prints a table.

    Args:
      workdir: of the run.
      names: of its clusters.
      settings: a dataclass, its flags.
      seconds: that the command took.
    """
    folders = {name: run_folder.of_cluster(workdir, name) for name in names}
    traces.gather(workdir, folders.values(), len(names) if settings.trace else 0)
    path, picture = workdir / "summary.json", workdir / "losses.png"
    curves = {name: metrics.read(each) for name, each in folders.items()}
    if records.is_stale(path, folders.values()):
        found = {name: records.read_summary(each) for name, each in folders.items()}
        flags = {
            name: str(value) if isinstance(value, pathlib.Path) else value
            for name, value in dataclasses.asdict(settings).items()
        }
        summary = {
            **records.provenance(records.wall_seconds(seconds, found.values())),
            "flags": flags,
            "clusters": [each for each in found.values() if each],
            "restarts": restarts.read(workdir, folders.values()),
            "losses": {
                name: records.first_and_last(each) for name, each in curves.items()
            },
        }
        records.write(path, summary)
    summary = records.read_summary(workdir)
    records.show(records.join(records.clusters(summary), records.missing(summary)))
    drawn = f", {picture}" if _plot(curves, picture) else ""
    process.progress(f"report: {path}{drawn}")


def _plot(curves: dict[str, Any], path: pathlib.Path) -> bool:
    """Draws the losses; returns False if there are none, or nothing to draw with."""
    lines = {
        name: [(each["step"], each["loss"]) for each in found if "loss" in each]
        for name, found in curves.items()
    }
    lines = {name: found for name, found in lines.items() if found}
    try:
        from matplotlib import figure
    except ImportError:  # pip install "nebula_jax[plots]"
        return False
    if not lines:
        return False
    drawn = figure.Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.subplots()
    for name, found in lines.items():
        axes.plot(*zip(*found, strict=True), label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    drawn.savefig(path, dpi=110)
    return True
