"""Codecs in a long run, beside one another, in Markdown."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report
from nebula_jax.training import metrics

WAYS = "forward", "backward"


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record of `table_long_run`."""
    parts = [
        f"loss apart, steps {begin + 1:,} to {end:,}"
        for begin, end in itertools.pairwise((record["first_step"], *record["parts"]))
    ]
    splits = list(record["rows"][0]["bleu"])
    header = [
        *("row", "codecs, forward and backward", "bytes a step, forward", "backward"),
        *("times fewer than padded float32", *parts),
        *(f"BLEU, {split}" for split in splits),
        "minutes",
    ]
    rows = [_row(row, len(parts), splits) for row in record["rows"]]
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        "Loss apart: training loss less that of the first row, nats, of the same"
        " batches; mean and standard error over logged steps, of each seed.",
        report.table(header, rows, "ll" + "r" * (len(header) - 2)),
        f"Fewest bytes of the rows that lose at most {record['limit']:g} nats in the"
        f" last part: **{record['chosen']}**.",
    )


def lost(row: Mapping[str, Any]) -> float:
    """Returns the nats that a row loses in the last part, the mean of its seeds.

    The first row, with which the others are compared, loses none.
    """
    return statistics.fmean([seed[-1]["mean"] for seed in row["apart"]] or [0.0])


def _row(row: Mapping[str, Any], parts: int, splits: Sequence[str]) -> list[str]:
    sent = [row["bytes"][way] for way in WAYS]
    apart = [
        ", ".join(
            f"{seed[part]['mean']:+.4f} ± {seed[part]['error']:.4f}"
            for seed in row["apart"]
        )
        for part in range(parts)
    ]
    return [
        row["name"],
        "<br>".join(f"`{codec}`" for codec in dict.fromkeys(row["codecs"])),
        *(metrics.in_bytes(each) for each in sent),
        f"{row['bytes']['padded'] / max(sent):.0f}",
        *apart,
        *(", ".join(f"{each:.1f}" for each in row["bleu"][split]) for split in splits),
        f"{row['minutes']:.0f}",
    ]
