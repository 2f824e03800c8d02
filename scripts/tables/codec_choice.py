"""Which codec at which line: the records' figures, for `which_codec.md`."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nebula_jax.runtime.records import report
from scripts.tables import held_out, sweep

Record = Mapping[str, Any]
FASTER = 170 / 60
"""The paper's other line beside the one on which the steps were measured."""
CUT = ("codec", "MB a step", "loss", "BLEU", "steps/s", "170 Mbit/s")
LOCAL = ("exchange", "clusters", "bytes a token", "times fewer", "loss")


def markdown(results: pathlib.Path) -> str:
    """Renders the table of a cut model and that of local steps."""
    cut, local = (
        json.loads((results / f"{name}.json").read_text("utf-8"))
        for name in ("table5_bottleneck", "local_steps")
    )
    # Modes that are withdrawn have rows in the records still.
    rows = [
        row
        for row in cut["rows"]
        if not row["staleness"] and "," not in row["bottleneck"]
    ]
    several = [
        row
        for row in local["rows"]
        if row.get("bytes") and row["difference"]["seeds"] > 1
    ]
    return report.join(
        report.table(CUT, [_cut_row(cut, row) for row in rows], "lrrrrr"),
        report.table(LOCAL, [_local_row(row) for row in several], "lrrrr"),
    )


def _cut_row(record: Record, row: Record) -> list[str]:
    speed, found = row["speed"], row["held_out"]
    sent = speed["forward"], speed["backward"]
    seconds = 8 * max(sent) / (record["line"]["rate"] * FASTER)
    most = 1 / max(seconds, record["line"]["compute_seconds"])
    codecs = dict.fromkeys([row["forward"], row["backward"]])
    name = " / ".join(f"`{each}`" for each in codecs)
    if row["bottleneck"]:
        name = f"`--bottleneck={row['bottleneck']}` {name}"
    bleu = found.get("bleu_difference", {}).get("difference")
    return [
        name,
        f"{sum(sent) / 1e6:.3f}",
        held_out.with_error(found.get("difference", {}), "+.3f"),
        "" if bleu is None else f"{bleu:+.2f}",
        f"{1 / speed['seconds']:.2f}",
        f"{most:.2f}",
    ]


def _local_row(row: Record) -> list[str]:
    sent, apart = row["bytes"], row["difference"]
    return [
        row["name"],
        str(row["clusters"]),
        f"{sent['per_token']:.2f}",
        f"{sent['fewer']:.0f}",
        sweep.mean_and_error(apart["mean"], apart["standard_error"], "+.1%"),
    ]
