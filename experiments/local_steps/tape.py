"""The tape of `--delta_codec=auto` in a run's report."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.local_steps import config
from nebula_jax.runtime.records import report


def markdown(clusters: Sequence[Mapping[str, Any]]) -> str:
    """Renders which codecs were chosen for deltas, and when; empty if none were.

    Args:
      clusters: summaries, with `cluster` and `rounds` (`local_rounds`). Clusters that
        exchange deltas have the same tape, which is rendered once.
    """
    tapes: dict[str, list[str]] = {}
    for each in clusters:
        rows = each.get("rounds", {}).get("tape", [])
        if rows:
            tapes.setdefault(_table(rows), []).append(each["cluster"])
    paragraphs = [
        f"Deltas of {', '.join(names)}:\n\n{text}" for text, names in tapes.items()
    ]
    return report.join(*paragraphs) if paragraphs else ""


def _table(rows: Sequence[Sequence[float]]) -> str:
    cells = []
    for rung, group in itertools.groupby(rows, key=lambda row: row[1]):
        same = list(group)
        waits = [row[5] for row in same[1:]]  # each is reported a round later
        cells.append(
            [
                f"{same[0][0]:.0f}",
                f"`{config.LADDER[int(rung)]}`",
                f"{statistics.median(row[3] for row in same):.4f}",
                f"{statistics.median(waits):.2f}" if waits else report.NOTHING,
            ]
        )
    header = ["from round", "codec", "cosine, median", "wait over its limit, median"]
    return report.table(header, cells, "rlrr")
