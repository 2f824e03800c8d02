"""Counts the fakes of a hot-started generator by temperature and mask rate.

    python -m scripts.fake_rates --data_dir=../shared/data

M3's discriminator learns from those masked tokens that a generator fills in wrongly
(section 3.1). A generator that begins with a good encoder may leave it too few. Each
run is the M3 of `m3_xnli15_warm.flags`, in one process and shorter. Runs are done once,
one after the other; after a stop, the same command goes on.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.m3 import curves as m3_curves
from experiments.m3 import report as m3_report
from nebula_jax.runtime.records import report, run_folder
from scripts import table_m3_recipe
from scripts.tables import config
from scripts.tables import runs as table_runs

PRETRAINING = "m3_xnli15_warm"
STEPS = 60


class Setting(NamedTuple):
    """The settings of a run that decide how fakes are made."""

    temperature: float
    mask_rate: float


SETTINGS = (
    Setting(1.0, 0.15),  # ELECTRA's; the paper states none
    Setting(0.5, 0.15),
    Setting(2.0, 0.15),
    Setting(1.0, 0.3),
)


def run_of(setting: Setting, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the M3 run of a setting."""
    return table_runs.Run(
        f"temperature{setting.temperature}-mask{setting.mask_rate}-seed{seed}",
        "experiments.pretrain_m3",
        (
            *table.arguments(table_runs.flagfile(PRETRAINING)),
            *table_m3_recipe.BEFORE,
            *(
                f"--temperature={setting.temperature}",
                f"--mask_rate={setting.mask_rate}",
            ),
            *("--cluster=whole", f"--steps={STEPS}", "--eval_every=20"),
            f"--seed={seed}",
        ),
    )


def gather(runs: table_runs.Runs, table: config.Table) -> list[dict[str, Any]]:
    """Gathers the table's rows; does the runs that have not been done."""
    return [
        _row(
            setting,
            [
                runs.result(run_of(setting, seed, table))["summary"]
                for seed in table.seeds
            ],
        )
        for setting in SETTINGS
    ]


def _row(setting: Setting, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages a setting's first and last figures over languages and seeds."""

    def mean(figure: str) -> list[float]:
        return [
            statistics.fmean(
                m3_report.mean(each["held_out"][when], figure) for each in summaries
            )
            for when in (0, -1)
        ]

    return setting._asdict() | {
        "steps": summaries[0]["held_out"][-1]["step"],
        "seconds": sum(each["seconds"] for each in summaries),
        **{figure: mean(figure) for figure in m3_curves.FIGURES},
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the table's record."""
    forms = {"fake_token_rate": ".1%", "sampled_mlm_accuracy": ".1%", "rtd_auc": ".3f"}
    rows = [
        [
            f"{row['temperature']:g}",
            f"{row['mask_rate']:g}",
            str(row["steps"]),
            f"{row['seconds'] / 60:.0f}",
            *(
                " → ".join(report.figure(value, form) for value in row[figure])
                for figure, form in forms.items()
            ),
        ]
        for row in result["rows"]
    ]
    header = [
        *("temperature", "mask rate", "steps", "minutes"),
        *("fake tokens, first → last", "masked tokens sampled right", "RTD AUC"),
    ]
    return report.join(
        report.heading(result, report.seeds(result), " of runs"),
        report.table(header, rows, "r" * len(header)),
    )


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    table = config.from_flags("fake_rates")
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(
            table.workdir, table_runs.summary_of, results=table.results
        )
        rows = gather(runs, table)
    about = runs.provenance(table.seeds)
    result = about | {"rows": rows}
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
