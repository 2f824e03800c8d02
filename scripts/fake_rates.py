"""How many fakes a hot-started generator makes, by temperature and by mask rate.

    python -m scripts.fake_rates --data_dir=../shared/data

M3's discriminator learns from those masked tokens that a generator fills in wrongly
(section 3.1); one that begins with a good encoder may leave it too few. Each run is
the M3 of the hot start, in one process and shorter.
Runs are done once, one after the other; when it was stopped, the same command goes on.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import lifecycle, shared_flags
from experiments.m3 import report as m3_report
from scripts.tables import runs as table_runs

for key_flag in ("out", "data_dir", "workdir", "pretrained_dir", "prepared_dir"):
    flags.declare_key_flag(key_flag)
flags.declare_key_flag("seeds")

NAME = "fake_rates"
PRETRAINING = "m3_xnli15_warm"
STEPS = 60


class Setting(NamedTuple):
    """How fakes are made."""

    temperature: float
    mask_rate: float


SETTINGS = (
    Setting(1.0, 0.15),  # ELECTRA's; the paper states none
    Setting(0.5, 0.15),
    Setting(2.0, 0.15),
    Setting(1.0, 0.3),
)


def run_of(setting: Setting, seed: str) -> table_runs.Run:
    """The M3 run that shows what a setting does."""
    return table_runs.Run(
        f"temperature{setting.temperature}-mask{setting.mask_rate}-seed{seed}",
        "experiments.pretrain_m3",
        (
            *table_runs.base_arguments(table_runs.flagfile(PRETRAINING)),
            *(
                f"--temperature={setting.temperature}",
                f"--mask_rate={setting.mask_rate}",
            ),
            *("--cluster=whole", f"--steps={STEPS}", "--eval_every=20"),
            f"--seed={seed}",
        ),
    )


def gather(runs: table_runs.Runs, seeds: Sequence[str]) -> list[dict[str, Any]]:
    """The table's rows; does the runs that have not been done."""
    return [
        _row(setting, [runs.result(run_of(setting, seed))["summary"] for seed in seeds])
        for setting in SETTINGS
    ]


def _row(setting: Setting, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A setting's figures, first and last, as means of languages and seeds."""

    def mean(figure: str) -> list[float]:
        ends = []
        for when in (0, -1):
            values = [
                each[figure]
                for summary in summaries
                for each in summary["held_back"][when]["languages"].values()
            ]
            ends.append(sum(values) / len(values))
        return ends

    return setting._asdict() | {
        "steps": summaries[0]["held_back"][-1]["step"],
        "seconds": sum(each["seconds"] for each in summaries),
        "commits": sorted({each["commit"] for each in summaries}),
        **{figure: mean(figure) for figure in m3_report.FIGURES},
    }


def main() -> int:
    """Runs what is missing; writes the figures."""
    seeds = table_runs.seeds(1)
    folder = pathlib.Path(shared_flags.WORKDIR.value or f"runs/{NAME}")
    with lifecycle.alone_in(folder):
        rows = gather(table_runs.Runs(folder, table_runs.summary_of), seeds)
    commits = [each for row in rows for each in row["commits"]]
    seconds = sum(row["seconds"] for row in rows)
    result = table_runs.provenance(commits, seconds, seeds) | {"rows": rows}
    table_runs.write(result, NAME)
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
