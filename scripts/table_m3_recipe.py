"""Probes what M3 does to a pretrained encoder, recipe by recipe: minutes a row.

    python -m scripts.table_m3_recipe --data_dir=../shared/data

Every row is the M3 of `m3_xnli15_warm.flags` in one process, short, from the first
layers of the same encoder; rows add one protection after the other. No row is
fine-tuned: a recipe is chosen by the probes of dev pairs alone, before any test set is
read, by a rule that was fixed beforehand (KEPT). Runs are done once; after a stop, the
same command goes on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.m3 import curves as m3_curves
from experiments.m3 import report as m3_report
from nebula_jax.runtime.records import run_folder
from scripts.tables import config, recipe_markdown
from scripts.tables import runs as table_runs

PRETRAINING = "m3_xnli15_warm"
STEPS, EVERY = 100, 25
KEPT = m3_report.GAP_KEPT
"""Share of the start's translation gap that a recipe has to keep."""
BEFORE = (
    *("--learning_rate=1e-4", "--head_warmup_steps=0", "--head_learning_rate=0"),
    *("--head_priors=false", "--layer_decay=1", "--freeze_embeddings=false"),
)
"""Flags of before there was a recipe: the flagfile has the one that was chosen."""
COMMON = (
    *("--cluster=whole", f"--steps={STEPS}", f"--eval_every={EVERY}"),
    *("--discriminator_layers=6", "--warmup_steps=20", f"--checkpoint_every={STEPS}"),
    *BEFORE,
)
ALONE = (*("--head_warmup_steps=25", "--head_learning_rate=1e-3"),)
PRIORS = (*ALONE, "--head_priors")
RATES = (
    *("--head_warmup_steps=25", "--head_learning_rate=5e-4", "--head_priors"),
    *("--learning_rate=2e-5", "--layer_decay=0.9"),
)
FROZEN = (*RATES, "--freeze_embeddings")
DEEPER = (*FROZEN, "--generator_layers=6")


class Row(NamedTuple):
    """A recipe."""

    name: str
    key: str
    """In the names of files."""
    arguments: tuple[str, ...] = ()
    """Flags beside COMMON."""


ROWS = (
    Row("as before", "before", ("--generator_layers=3",)),
    Row("heads first", "alone", ("--generator_layers=3", *ALONE)),
    Row("+ priors", "priors", ("--generator_layers=3", *PRIORS)),
    Row("+ lower rates, by layer", "rates", ("--generator_layers=3", *RATES)),
    Row("+ embeddings frozen", "frozen", ("--generator_layers=3", *FROZEN)),
    Row("+ generators of 6 layers", "deeper", DEEPER),
    Row("the last, rate 5e-5", "rate5", (*DEEPER, "--learning_rate=5e-5")),
    Row("the last, rate 1e-4", "rate10", (*DEEPER, "--learning_rate=1e-4")),
    Row("+ generators of 6, λ 10", "lambda", (*DEEPER, "--rtd_weight=10")),
    Row(
        "+ generators of 6 layers, unigrams", "unigrams", (*DEEPER, "--fakes=unigrams")
    ),
)


def run_of(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the M3 run of a recipe."""
    return table_runs.Run(
        f"{row.key}-seed{seed}",
        "experiments.pretrain_m3",
        (
            *table.arguments(table_runs.flagfile(PRETRAINING)),
            *(*COMMON, f"--seed={seed}", *row.arguments),
        ),
    )


def figures_of(row: Row, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Picks a recipe's figures from the summary of its run; means of languages."""
    probes, held_out = summary["probes"], summary["held_out"]
    gaps = [
        (each["step"], m3_curves.mean(each["translation_gap"].values()))
        for each in probes
    ]
    norms = [each for each in probes if "rtd_encoder_gradient" in each]
    return {
        "name": row.name,
        "arguments": list(row.arguments),
        "gaps": gaps,
        "retrieval": [
            m3_curves.mean(each["retrieval"].values())
            for each in (probes[0], probes[-1])
        ],
        "gradients": {
            name: [norms[0][f"{name}_gradient"], norms[-1][f"{name}_gradient"]]
            for name in ("rtd_encoder", "clm_encoder", "rtd_heads", "clm_heads")
        },
        **{
            figure: m3_report.mean(held_out[-1], figure) for figure in m3_curves.FIGURES
        },
        "generators": summary["generators"],
        "seconds": summary["seconds"],
    }


def main() -> int:
    """Does the missing runs; writes and prints the table, and draws the picture."""
    table = config.from_flags("m3_recipe")
    rows = []
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(
            table.workdir, table_runs.summary_of, results=table.results
        )
        for row in ROWS:
            found = runs.result(run_of(row, table.seeds[0], table))
            rows.append(figures_of(row, found["summary"]))
    about = runs.provenance(table.seeds[:1])
    result = about | {"rows": rows, "steps": STEPS, "kept": KEPT}
    recipe_markdown.picture(result, table.out.with_suffix(".png"))
    table_runs.write(result, recipe_markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
