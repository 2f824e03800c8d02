"""What the reports of all experiments share: hardware, clusters, losses."""

import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import rich.table

from nebula_jax.training import metrics


def hardware() -> dict[str, Any]:
    """What the run ran on."""
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


def read(folder: pathlib.Path) -> dict[str, Any]:
    """A cluster's summary.json; {} if there is none."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def first_and_last(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loss that was logged first and last, and at which steps; {} if none was."""
    steps = [record for record in records if "loss" in record]
    if not steps:
        return {}
    return {
        "first": steps[0]["loss"],
        "first_step": steps[0]["step"],
        "last": steps[-1]["loss"],
        "last_step": steps[-1]["step"],
    }


def clusters_table(summary: dict[str, Any]) -> rich.table.Table:
    """A row a cluster: steps, loss, speed, bytes, waiting."""
    table = rich.table.Table(title="Clusters")
    for column in (
        "cluster",
        "steps",
        "loss",
        "tokens/s",
        "sent",
        "received",
        "waited",
    ):
        table.add_column(column, justify="left" if column == "cluster" else "right")
    for each in summary["clusters"]:
        losses = summary["losses"][each["cluster"]]
        table.add_row(
            each["cluster"],
            f"{each['first_step']}-{each['last_step']}",
            f"{losses['first']:.3f} → {losses['last']:.3f}",
            f"{each['tokens_per_second']:,.0f}",
            metrics.in_bytes(each["bytes_sent"]),
            metrics.in_bytes(each["bytes_received"]),
            f"{each['waited_seconds'] / each['seconds']:.0%}",
        )
    return table
