"""The tape of `--delta_codec=auto` in a run's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.local_steps import config
from nebula_jax.runtime import report


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
    cells, before = [], None
    for number, rung, _, cosine, _, waits in rows:
        if rung != before:
            codec = f"`{config.LADDER[int(rung)]}`"
            cells.append([f"{number:.0f}", codec, f"{cosine:.4f}", f"{waits:.2f}"])
        before = rung
    header = ["from round", "codec", "cosine there", "wait there over its limit"]
    return report.table(header, cells, "rlrr")
