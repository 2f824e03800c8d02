"""Holds M3 on layers of today (`--body=modern`) beside M3 on BERT's, at equal compute.

    python -m scripts.table_body --data_dir=../shared/data
    python -m scripts.table_body --scale=quick --data_dir=../shared/data

The second shows in minutes how the table is made, and measures nothing.
Every row trains in one process on the same batches in the same order, with the same
masks. All text is new when a step takes it, so the losses of the last quarter of the
steps are those of text that was not trained on.
"""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import configuration, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import report as m3_report
from nebula_jax.commands import fields
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.training import metrics
from scripts.plans import traced
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

STEPS = {"": 200, "quick": 10}  # scale -> steps of a run
SETTINGS = (  # flags of all rows, beside those of m3_xnli15_tiny
    *("--generators=en es|de tr", "--generator_layers=4", "--batch_size=4"),
    # Four layers, of which two are global, and rows longer than half a window.
    *("--discriminator_size=tiny", "--discriminator_layers=4", "--max_length=128"),
    # Few steps, at a rate that learns soon.
    *("--learning_rate=1e-3", "--warmup_steps=20", "--probe_pairs=0"),
    *("--log_every=5", "--cluster=whole"),
)
ROWS = {  # name of a row -> its flags; the others are compared with the first
    "BERT's": ("--body=bert",),
    "modern": ("--body=modern",),
    "modern, disentangled": ("--body=modern", "--disentangled"),
}
LOSSES = {"mlm": "generators' MLM", "rtd": "RTD", "clm": "CLM"}


def run_of(arguments: Sequence[str], table: config.Table, seed: str) -> table_runs.Run:
    """Describes the run of a row with these flags."""
    steps = STEPS[table.scale]
    every = (f"--steps={steps}", f"--eval_every={steps}", f"--checkpoint_every={steps}")
    flags = table.arguments(table_runs.flagfile("m3_xnli15_tiny"))
    name = "-".join(each.partition("=")[2] or each[2:] for each in arguments)
    return table_runs.Run(
        f"{name}-seed{seed}",
        "experiments.pretrain_m3",
        (*flags, *SETTINGS, *every, *arguments, f"--seed={seed}"),
    )


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads a finished run's losses, and counts the operations of its steps."""
    summary = report.read_summary(workdir)
    records = metrics.read(run_folder.of_cluster(workdir, "whole"))
    given = configuration.flags_of_run(workdir, run.module)
    settings = [fields.read(cls, given) for cls in (m3_config.Agreed, m3_config.Local)]
    made = m3_config.Run(*settings)
    of_generator, of_discriminator = (
        part.flops(part.rows) for part in traced.parts(made)
    )
    return {
        "summary": summary,
        "losses": late_losses(records, summary["flags"]["steps"]),
        "flops": traced.generators(made) * of_generator + of_discriminator,
    }


def late_losses(records: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Returns the means of the losses of the last quarter of the steps."""
    late = [each for each in records if "rtd_loss" in each]
    late = [each for each in late if each["step"] > 0.75 * steps]
    names = {name: [f"{name}_loss"] for name in ("rtd", "clm")}
    names["mlm"] = [name for name in late[0] if name.startswith("generator_")]
    return {
        loss: statistics.fmean(each[name] for each in late for name in names[loss])
        for loss in LOSSES
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    rows: list[dict[str, Any]] = []
    for name, arguments in ROWS.items():
        done = runs.of_seeds(functools.partial(run_of, arguments, table), table.seeds)
        losses = {
            loss: [each["losses"][loss] for each in done.values()] for loss in LOSSES
        }
        beside = rows[0]["losses"] if rows else losses
        summaries = [each["summary"] for each in done.values()]
        rows.append(
            {
                "name": name,
                "flops": done[table.seeds[0]]["flops"],
                "losses": losses,
                "differences": {
                    loss: [a - b for a, b in zip(found, beside[loss], strict=True)]
                    for loss, found in losses.items()
                },
                "rtd_auc": [
                    m3_report.mean_of(each["held_out"][-1], "rtd_auc")
                    for each in summaries
                ],
                "minutes": statistics.fmean(each["seconds"] for each in summaries) / 60,
            }
        )
    return {"steps": STEPS[table.scale], "rows": rows}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""

    def loss(row: Mapping[str, Any], name: str) -> str:
        apart = row["differences"][name]
        beside = f" ({sweep.spread(apart, '+.4f', of_mean=True)})" if any(apart) else ""
        return f"{statistics.fmean(row['losses'][name]):.4f}{beside}"

    columns = [
        sweep.Column("body", "name"),
        sweep.Column("GFLOP a step", lambda row: row["flops"] / 1e9, ".2f"),
        *(
            sweep.Column(title, functools.partial(loss, name=name))
            for name, title in LOSSES.items()
        ),
        sweep.Column("RTD AUC", lambda row: sweep.spread(row["rtd_auc"], ".3f")),
        sweep.Column("minutes", "minutes", ".1f"),
    ]
    return report.join(
        report.heading(record, report.seeds(record)),
        f"{record['steps']} steps of M3. Losses are means of the last quarter of the"
        " steps and of the seeds, nats: MLM and CLM a masked token, RTD a token; in"
        f" brackets the difference from {record['rows'][0]['name']}, paired by seed,"
        " with its standard error. The RTD AUC is that of held-out text after the last"
        " step, with the standard deviation over seeds. Operations are those of the"
        " gradients, as XLA counts them before it compiles.",
        sweep.table(columns, record["rows"], "lrrrrrr"),
    )


SWEEP = sweep.Sweep(
    "body",
    record,
    markdown,
    figures=figures,
    scales=list(STEPS),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
