"""Compares codecs in a long run: what costs nothing in few steps may cost something.

    python -m scripts.table_long_run --data_dir=../shared/data

Every row is the run of `abnet_es_en.flags` with other columns and codecs. A seed's runs
see the same sentences in the same order, so their training losses are compared step by
step, which resolves what BLEU of 400 sentences does not. The flagfile has the row with
the fewest bytes that keeps the first row's loss, by the limit that Table 5 has
(LOSS_APART). Runs are done once, one after the other; after a stop, the same command
goes on.
"""

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_es_en"
WAYS = "forward", "backward"
PARTS = 1000, 2000, 3000
"""Last steps of the parts in which losses are compared; the first begins where the
learning rate has risen."""
LOSS_APART = 0.01
"""Nats that a row may lose in the last part: the limit that Table 5 has."""
PLAIN = "pack_tokens|fp16", "pack_tokens|int8(64)"
INT4 = ("pack_tokens|hadamard|int4(64)",) * 2
BY_TOKEN = ("pack_tokens|int4(row)|fp16|zstd(1)",) * 2


class Row(NamedTuple):
    """The columns that cross, and their codecs."""

    name: str
    key: str
    """In the names of files."""
    columns: str
    """For --bottleneck; 0 for all columns."""
    codecs: tuple[str, str]
    """Forward and backward."""


ROWS = (
    Row("all columns, fp16 and int8", "plain", "0", PLAIN),
    Row("all columns, int4", "int4", "0", INT4),
    Row("208 columns, int4 by token and zstd", "208", "208", BY_TOKEN),
    Row("288 columns, int4 by token and zstd", "288", "288", BY_TOKEN),
)


def run_of(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the run of a row."""
    forward, backward = row.codecs
    own = (
        f"--bottleneck={row.columns}",
        f"--forward_codec={forward}",
        f"--backward_codec={backward}",
        f"--seed={seed}",
    )
    base = table.arguments(table_runs.flagfile(FLAGFILE))
    return abnet_runs.run(f"{row.key}-seed{seed}", (*base, *own))


def apart(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], first_step: int
) -> list[dict[str, float]]:
    """Compares the training losses of two runs that saw the same batches.

    Args:
      one: [step, loss] of the logged steps.
      other: likewise, of the run that it is compared with.
      first_step: those up to it are left out.

    Returns:
      For each of PARTS that both have two logged steps of: `mean` of one's loss less
      the other's, nats, and `error`, its standard error over logged steps.
    """
    losses = {step: loss for step, loss in other}
    found = []
    for begin, end in itertools.pairwise((first_step, *PARTS)):
        part = [
            loss - losses[step]
            for step, loss in one
            if begin < step <= end and step in losses
        ]
        if len(part) > 1:
            error = statistics.stdev(part) / len(part) ** 0.5
            found.append({"mean": statistics.fmean(part), "error": error})
    return found


def figures_of(
    row: Row,
    runs: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
    first_step: int,
) -> dict[str, Any]:
    """Picks a row's figures, of its runs and of the first row's of the same seeds."""
    losses = [
        (one["losses"], other["losses"]) for one, other in zip(runs, plain, strict=True)
    ]
    summaries = [each["summary"] for each in runs]
    last = [summary["bleu"][-1] for summary in summaries]
    return {
        "name": row.name,
        "columns": row.columns,
        "codecs": list(row.codecs),
        "bytes": {
            way: statistics.fmean(summary["bytes"][way] for summary in summaries)
            for way in (*WAYS, "padded")
        },
        "bleu": {
            split: [each[split] for each in last]
            for split in last[0]
            if split != "step"
        },
        "minutes": statistics.fmean(summary["seconds"] / 60 for summary in summaries),
        "apart": [apart(*pair, first_step) for pair in losses if row != ROWS[0]],
    }


def lost(row: Mapping[str, Any]) -> float:
    """Returns the nats that a row loses in the last part, the mean of its seeds.

    The first row, with which the others are compared, loses none.
    """
    return statistics.fmean([seed[-1]["mean"] for seed in row["apart"]] or [0.0])


def chosen(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the row with the fewest bytes of those that keep the loss."""
    kept = [row for row in rows if lost(row) <= LOSS_APART]
    least = min(kept, key=lambda row: sum(row["bytes"][way] for way in WAYS))
    return str(least["name"])


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    first_step = int(table_runs.settings(table_runs.flagfile(FLAGFILE))["warmup_steps"])
    found = {
        row: [runs.result(run_of(row, seed, table)) for seed in table.seeds]
        for row in ROWS
    }
    rows = [
        figures_of(row, results, found[ROWS[0]], first_step)
        for row, results in found.items()
    ]
    about = {"first_step": first_step, "parts": PARTS, "limit": LOSS_APART}
    return about | {"rows": rows, "chosen": chosen(rows)}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""
    parts = itertools.pairwise((record["first_step"], *record["parts"]))
    apart = [f"loss apart, steps {begin + 1:,} to {end:,}" for begin, end in parts]
    columns = [
        sweep.Column("row", "name"),
        sweep.Column("codecs, forward and backward", _codecs),
        sweep.Column("bytes a step, forward", lambda row: _bytes(row, "forward")),
        sweep.Column("backward", lambda row: _bytes(row, "backward")),
        sweep.Column("times fewer than padded float32", _fewer, ".0f"),
        *(
            sweep.Column(name, functools.partial(_apart, part))
            for part, name in enumerate(apart)
        ),
        *(
            sweep.Column(f"BLEU, {split}", f"bleu.{split}", ".1f")
            for split in record["rows"][0]["bleu"]
        ),
        sweep.Column("minutes", "minutes", ".0f"),
    ]
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        "Loss apart: training loss less that of the first row, nats, of the same"
        " batches; mean and standard error over logged steps, of each seed.",
        sweep.table(columns, record["rows"], "ll" + "r" * (len(columns) - 2)),
        f"Fewest bytes of the rows that lose at most {record['limit']:g} nats in the"
        f" last part: **{record['chosen']}**.",
    )


def _codecs(row: Mapping[str, Any]) -> str:
    return "<br>".join(f"`{codec}`" for codec in dict.fromkeys(row["codecs"]))


def _bytes(row: Mapping[str, Any], way: str) -> str:
    return metrics.in_bytes(row["bytes"][way])


def _fewer(row: Mapping[str, Any]) -> float:
    return row["bytes"]["padded"] / max(row["bytes"][way] for way in WAYS)


def _apart(part: int, row: Mapping[str, Any]) -> str:
    of_seeds = (seed[part] for seed in row["apart"])
    return ", ".join(f"{each['mean']:+.4f} ± {each['error']:.4f}" for each in of_seeds)


SWEEP = sweep.Sweep("long_run", record, markdown, abnet_runs.figures)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=config.FLAGS)
