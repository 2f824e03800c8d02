"""Compares codecs in a long run: what costs nothing in few steps may cost something.

    python -m scripts.table_long_run --data_dir=../shared/data

Every row is the run of `abnet_es_en.flags` with other columns and codecs. A seed's runs
see the same sentences in the same order, so their training losses are compared step by
step, which resolves what BLEU of 400 sentences does not. The flagfile has the row with
the fewest bytes that keeps the first row's loss, by the limit that Table 5 has
(LOSS_APART). Runs are done once, one after the other; after a stop, the same command
goes on.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from nebula_jax.runtime.records import run_folder
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, long_run_markdown
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_es_en"
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
    """For --bottleneck; empty for all columns."""
    codecs: tuple[str, str]
    """Forward and backward."""


ROWS = (
    Row("all columns, fp16 and int8", "plain", "", PLAIN),
    Row("all columns, int4", "int4", "", INT4),
    Row("208 columns, int4 by token and zstd", "208", "208", BY_TOKEN),
    Row("288 columns, int4 by token and zstd", "288", "288", BY_TOKEN),
)


def run_of(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the run of a row."""
    forward, backward = row.codecs
    return table_runs.Run(
        f"{row.key}-seed{seed}",
        abnet_runs.MODULE,
        (
            *table.arguments(table_runs.flagfile(FLAGFILE)),
            f"--bottleneck={row.columns}",
            *(f"--forward_codec={forward}", f"--backward_codec={backward}"),
            f"--seed={seed}",
        ),
    )


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
    """Picks a row's figures.

    Args:
      row: of ROWS.
      runs: the figures of its runs (`abnet.figures`), one for each seed.
      plain: likewise, of the first row.
      first_step: of `apart`.
    """
    pairs = zip(runs, plain, strict=True)
    losses = [(one["losses"], other["losses"]) for one, other in pairs]
    summaries = [each["summary"] for each in runs]
    last = [summary["bleu"][-1] for summary in summaries]
    return {
        "name": row.name,
        "columns": row.columns,
        "codecs": list(row.codecs),
        "bytes": {
            way: statistics.fmean(summary["bytes"][way] for summary in summaries)
            for way in ("forward", "backward", "padded")
        },
        "bleu": {
            split: [each[split] for each in last]
            for split in last[0]
            if split != "step"
        },
        "minutes": statistics.fmean(summary["seconds"] / 60 for summary in summaries),
        "apart": [apart(*pair, first_step) for pair in losses if row != ROWS[0]],
    }


def chosen(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the row with the fewest bytes of those that keep the loss."""
    kept = [row for row in rows if long_run_markdown.lost(row) <= LOSS_APART]
    name: str = min(kept, key=_bytes)["name"]
    return name


def _bytes(row: Mapping[str, Any]) -> float:
    return float(row["bytes"]["forward"] + row["bytes"]["backward"])


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    table = config.from_flags("long_run")
    first_step = int(table_runs.settings(table_runs.flagfile(FLAGFILE))["warmup_steps"])
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, abnet_runs.figures, results=table.results)
        found = {
            row: [runs.result(run_of(row, seed, table)) for seed in table.seeds]
            for row in ROWS
        }
    rows = [
        figures_of(row, results, found[ROWS[0]], first_step)
        for row, results in found.items()
    ]
    result = {
        **runs.provenance(table.seeds),
        "first_step": first_step,
        "parts": PARTS,
        "limit": LOSS_APART,
        "rows": rows,
        "chosen": chosen(rows),
    }
    table_runs.write(result, long_run_markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
