"""Reproduces Table 2 on two cores: ABNet, and ABNet over two clusters.

    python -m scripts.table2_bleu --scale=tiny --data_dir=../shared/data
    python -m scripts.table2_bleu --scale=quick --data_dir=../shared/data

The second shows in minutes how the table is made, and measures nothing.
ABNet decodes from left to right, and in another row by mask-predict, as ABNet's code
does. ABNet-Cloud is two processes that compress what crosses. Commit e569476b has the
record's first row too, a Transformer from scratch.

Both pairs have the same flags. Chinese has no spaces, so --max_words limits its English
side alone; of six English words that is enough.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import shared_flags
from nebula_jax.runtime.records import report
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, held_out, sweep
from scripts.tables import runs as table_runs

PAIRS = ("es-en", "zh-en")
MASKED, ABNET, CLOUD = "ABNet, mask-predict", "ABNet", "ABNet-Cloud"
CLOUD_CODEC = "pack_tokens|int8(64)"
FLAGS = {  # method -> its flags, in the table's order
    MASKED: ("--cluster=whole", "--objective=cmlm", "--beams=4"),
    ABNET: ("--cluster=whole",),
    CLOUD: (
        "--cluster=all",
        f"--forward_codec={CLOUD_CODEC}",
        f"--backward_codec={CLOUD_CODEC}",
    ),
}
MASKED_LOSS = (
    "Mask-predict's loss is of masked pieces, from the others on both sides of them; so"
    " it is not compared with that of pieces from those before."
)


def run_of(base: Sequence[str], method: str, pair: str, seed: str) -> table_runs.Run:
    """Describes a run of the table."""
    own = f"--pair={pair}", f"--seed={seed}", *FLAGS[method]
    kind = method.lower().replace(",", "").replace(" ", "_")
    name = f"{kind}-{pair}-seed{seed}"
    return table_runs.Run(name, abnet_runs.MODULE, (*base, *own))


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    _, base = abnet_runs.base_of(table)
    done = {
        (method, pair): runs.of_seeds(
            functools.partial(run_of, base, method, pair), table.seeds
        )
        for method in FLAGS
        for pair in PAIRS
    }
    scores = {key: held_out.by_seed(found) for key, found in done.items()}
    rows = []
    for method in FLAGS:
        results = [each for pair in PAIRS for each in done[method, pair].values()]
        rows.append(
            {
                "method": method,
                "pairs": [
                    {
                        "pair": pair,
                        "bleu": abnet_runs.bleus(done[method, pair].values()),
                        **held_out.compare(scores[method, pair], scores[ABNET, pair]),
                    }
                    for pair in PAIRS
                ],
                "seconds": sum(each["summary"]["seconds"] for each in results),
                "trained_parameters": sum(
                    each["trained_parameters"]
                    for each in results[-1]["summary"]["clusters"]
                ),
            }
        )
    return {"rows": rows}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record under the paper's rows."""
    known = sweep.PAPER["table2"]
    ours = [each for row in record["rows"] for each in row["pairs"]]

    def cell(pair: str, column: sweep.Column, row: Mapping[str, Any]) -> str:
        if "pairs" in row:
            found = (each for each in row["pairs"] if each["pair"] == pair)
            return column.cell(next(found, {}))
        # Of the paper there is BLEU alone, and not of all pairs.
        return report.figure(row[pair] or None, ".2f") if column.name == "BLEU" else ""

    def ours_alone(render: Callable[[Mapping[str, Any]], str]) -> Any:
        return lambda row: render(row) if "pairs" in row else ""

    columns = [
        sweep.Column(
            "method", lambda row: "paper: " * ("pairs" not in row) + row["method"]
        ),
        *(
            sweep.Column(f"{pair}: {each.name}", functools.partial(cell, pair, each))
            for pair in known["pairs"]
            for each in held_out.COLUMNS
        ),
        sweep.Column(
            "trained parameters",
            ours_alone(lambda row: f"{row['trained_parameters'] / 1e6:.1f} million"),
        ),
        sweep.Column("minutes", ours_alone(lambda row: f"{row['seconds'] / 60:.1f}")),
    ]
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        held_out.explanation(ours, "ABNet"),
        sweep.table(columns, [*known["rows"], *record["rows"]]),
        MASKED_LOSS,
    )


SWEEP = sweep.Sweep(
    "table2",
    record,
    markdown,
    figures=abnet_runs.figures,
    scales=list(abnet_runs.CUTS),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
