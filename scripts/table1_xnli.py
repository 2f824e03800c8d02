"""Reproduces Table 1 on two cores: XNLI before M3, after it, and from scratch.

    python -m scripts.table1_xnli --scale=small --seeds=3 --data_dir=../shared/data

Every row is an encoder fine-tuned on the same English pairs and tested in 15 languages:
the pretrained one; the same after M3 in one cluster; after M3 across four clusters on
this machine; and a smaller one that M3 trained from random weights, with other flags of
fine-tuning (see ROWS). Where M3 across clusters leaves, byte for byte, the encoder that
M3 in one cluster leaves, one fine-tuning counts for both. Runs are done once, one after
the other; after a stop, the same command goes on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import shared_flags
from experiments.m3 import report as m3_report
from nebula_jax.evaluation import xnli
from nebula_jax.runtime import report, run_folder
from scripts.tables import config, paper, xnli_markdown
from scripts.tables import runs as table_runs

for _name in config.FLAGS:
    flags.declare_key_flag(_name)

SEEDS = 3  # by default
WARM, SCRATCH = "m3_xnli15_warm", "m3_xnli15_tiny"
FINE_TUNING = "xnli_warm"
MOST_APART = 0.5  # points, M3 across clusters from M3 in one


class Row(NamedTuple):
    """An encoder."""

    name: str
    pretraining: str = ""
    """Flagfile of the M3 run that makes it; empty for the pretrained encoder."""
    cluster: str = ""
    """The value of --cluster in that run."""
    more: tuple[str, ...] = ()
    """More flags of the fine-tuning."""


IN_ONE = Row("after M3 in one cluster", WARM, "whole")
ACROSS = Row("after M3 across clusters", WARM, "all")
ROWS = (
    Row("as it comes"),
    IN_ONE,
    ACROSS,
    Row(
        "M3 across clusters, from scratch",
        SCRATCH,
        "all",
        # It has 64 positions, and no pretraining that a high rate could spoil.
        (
            *("--length_buckets=20,28,36,48,64", "--nofreeze_embeddings"),
            *("--layer_decay=1.0", "--learning_rate=5e-4"),
        ),
    ),
)
"""The rows of Table 1, under the paper's."""

SCALES = {
    "small": {
        WARM: (),
        SCRATCH: ("--steps=500",),
        FINE_TUNING: (
            *("--max_train_pairs=12000", "--max_test_pairs=1200", "--epochs=1"),
            *("--eval_every=125", "--checkpoint_every=375"),
        ),
    }
}
"""Scale -> flagfile -> the flags that replace some of it."""


def pretraining_run(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the M3 run that makes a row's encoder."""
    flagfile = table_runs.flagfile(row.pretraining)
    return table_runs.Run(
        f"{row.pretraining}-{row.cluster}-seed{seed}",
        "experiments.pretrain_m3",
        (
            *table.arguments(flagfile),
            *SCALES[table.scale][row.pretraining],
            *(f"--cluster={row.cluster}", f"--seed={seed}"),
        ),
        makes=table_runs.Folder(
            encoder_name(row, seed), f"{_discriminators_folder(row)}/encoder"
        ),
    )


def encoder_name(row: Row, seed: str) -> str:
    """Names the folder that a row's encoder is kept in."""
    return f"{row.pretraining}-{row.cluster}-seed{seed}"


def _discriminators_folder(row: Row) -> str:
    """Names the discriminator's folder in that of an M3 run."""
    return "whole" if row.cluster == "whole" else "discriminator"


def fine_tuning_run(
    row: Row, seed: str, table: config.Table, runs: table_runs.Runs
) -> table_runs.Run:
    """Describes the run that measures a row's accuracies."""
    flagfile = table_runs.flagfile(FINE_TUNING)
    encoder, made_by = (), None
    if row.pretraining:
        encoder = (f"--encoder={runs.made(encoder_name(row, seed))}",)
        made_by = pretraining_run(row, seed, table)
    kind = f"{row.pretraining}-{row.cluster}" if row.pretraining else "as_it_comes"
    return table_runs.Run(
        f"xnli-{kind}-seed{seed}",
        "experiments.finetune_xnli",
        (
            *table.arguments(flagfile),
            *SCALES[table.scale][FINE_TUNING],
            *(*row.more, f"--seed={seed}", *encoder),
        ),
        after=made_by,
    )


def gather(runs: table_runs.Runs, table: config.Table) -> list[dict[str, Any]]:
    """Gathers the table's rows, of the runs that have ended."""
    rows = []
    for row in ROWS:
        found = [
            runs.found(fine_tuning_run(row, seed, table, runs)) for seed in table.seeds
        ]
        summaries = [each["summary"] for each in found if each is not None]
        if not summaries:
            continue
        made = []
        if row.pretraining:
            made = [
                runs.found(pretraining_run(row, seed, table)) for seed in table.seeds
            ]
        spread = xnli.over_seeds([each["test"]["accuracy"] for each in summaries])
        rows.append(
            {
                "name": row.name,
                "more": list(row.more),
                "seeds": len(summaries),
                "accuracy": {name: each.mean for name, each in spread.items()},
                "deviation": {name: each.deviation for name, each in spread.items()},
                "averages": [each["test"]["average"] for each in summaries],
                "not_fine_tuned_again": sum(
                    "same_as" in each for each in found if each is not None
                ),
                "warnings": sorted(
                    {line for each in summaries for line in each["test"]["warnings"]}
                ),
                "pretraining": [
                    _pretraining_figures(each["summary"]) for each in made if each
                ],
                "seconds": sum(each["seconds"] for each in summaries),
                "commits": sorted(
                    {
                        commit
                        for each in (
                            *summaries,
                            *(one["summary"] for one in made if one),
                        )
                        for commit in each["commit"].split(", ")  # it was resumed
                    }
                ),
                "pairs": sum(summaries[0]["text"]["labels"]["train"]["en"].values()),
                "rows": min(summaries[0]["test"]["rows"].values()),
            }
        )
    return rows


def _pretraining_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Picks the table's figures of an M3 run: first and last, means of languages."""
    ends = summary["held_out"][0], summary["held_out"][-1]
    return {
        "steps": ends[-1]["step"],
        "seconds": summary["seconds"],
        **{
            figure: [m3_report.mean(each, figure) for each in ends]
            for figure in ("fake_token_rate", "rtd_auc")
        },
    }


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares what was measured with the targets."""
    averages = {row["name"]: row["averages"] for row in rows}
    one, across = (averages.get(row.name) for row in (IN_ONE, ACROSS))
    if one is None or across is None:
        return []
    apart = max(100 * abs(a - b) for a, b in zip(across, one, strict=False))
    return [
        {
            "what": "points between M3 across clusters and in one, same seed, at most",
            "value": apart,
            "at_most": MOST_APART,
            "met": apart <= MOST_APART,
        }
    ]


def work(runs: table_runs.Runs, table: config.Table) -> None:
    """Does the runs that have not been done, seed by seed."""
    for seed in table.seeds:
        for row in ROWS:
            if row.pretraining:
                runs.result(pretraining_run(row, seed, table))
            like = None
            if row is ACROSS:
                like = fine_tuning_run(IN_ONE, seed, table, runs)
            runs.result(fine_tuning_run(row, seed, table, runs), like)


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    table = config.from_flags("table1", list(SCALES), SEEDS)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, table_runs.summary_of)
        work(runs, table)
        rows = gather(runs, table)
    commits = [each for row in rows for each in row["commits"]]
    seconds = sum(
        row["seconds"] + sum(each["seconds"] for each in row["pretraining"])
        for row in rows
    )
    result = {
        **report.provenance(seconds, commits=sorted(set(commits)), seeds=table.seeds),
        "rows": rows,
        "targets": targets(rows),
    }
    markdown = xnli_markdown.table1(result, paper.PAPER["table1"])
    table_runs.write(result, markdown, table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
