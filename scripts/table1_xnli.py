"""Reproduces Table 1 on two cores: does M3 help an encoder? XNLI before and after it.

    python -m scripts.table1_xnli --scale=six --data_dir=../shared/data
    python -m scripts.table1_xnli --scale=tiny --data_dir=../shared/data

The first takes nine hours. The second shows in a small part of that how the table is
made: after so few steps and pairs its accuracies are nearly guesses.

All rows begin with the first layers of the same encoder, as many as `--scale` names: as
it comes; after masked language modeling went on for as many seconds; after M3. Each is
fine-tuned on the same English pairs, and tested in 15 languages. Rows are compared seed
by seed, and by a bootstrap over the test rows. M3 of six layers across clusters should
leave, byte for byte, what it leaves in one process; that is checked for the first seed.
Runs are done once, one after the other; after a stop, the same command goes on.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.m3 import report as m3_report
from nebula_jax.evaluation import xnli
from nebula_jax.runtime.records import report
from scripts.tables import config, sweep, xnli_rows
from scripts.tables import runs as table_runs

BERT, M3 = "experiments.pretrain_bert", "experiments.pretrain_m3"
TINY = "tiny"
LAYERS = {"six": 6, "twelve": 12, TINY: 2}  # scale -> layers that all rows begin with
FEWER = "en th|sw|ur"  # the generators' languages at TINY; their text is soon prepared
STEPS = {"six": 500, "twelve": 500, TINY: 20}  # scale -> steps of M3
CHEAPER = 2  # MLM steps in the time of one of M3, a generators' and a discriminator's
RECIPE = (
    *("--head_learning_rate=5e-4", "--head_priors"),
    *("--learning_rate=5e-5", "--layer_decay=0.9", "--freeze_embeddings"),
)
"""Flags of both kinds of pre-training: those of the record m3_recipe with the best
retrieval, of the recipes that keep the translation gap."""
HEADS_ALONE = 5  # the first fifth of the steps trains heads alone, in both
FINE_TUNING = (
    *("--max_train_pairs=20000", "--epochs=1", "--max_test_pairs=0"),
    *("--checkpoint_selection=last", "--eval_every=125", "--checkpoint_every=625"),
)
OWN: dict[str, tuple[str, ...]] = {
    "six": (),
    "twelve": ("--learning_rate=4e-4",),
    TINY: (
        *("--max_train_pairs=1600", "--max_test_pairs=100", "--learning_rate=1e-3"),
        *("--eval_every=50", "--checkpoint_every=50"),
    ),
}
"""Scale -> its own flags of the fine-tuning. The rate of twelve layers, for all of them
twice that of the flagfile, is what xnli_recipe chose on dev pairs, after the runs from
six layers."""


class Row(NamedTuple):
    """An encoder."""

    name: str
    key: str  # in the names of files
    module: str = ""  # the experiment that makes it; empty for the encoder as it comes


AS_IT_COMES = Row("as it comes", "as_it_comes")
MLM = Row("masked language modeling went on", "mlm", BERT)
WHOLE = Row("M3", "m3", M3)
ROWS = (AS_IT_COMES, MLM, WHOLE)
"""The rows of Table 1, under the paper's. Commit 80ccd4fe has more, which the record of
six layers lists: read by [CLS], without translations, with a smaller λ."""


def pretraining_run(
    row: Row, table: config.Table, seed: str, cluster: str = "whole"
) -> table_runs.Run:
    """Describes the run that makes a row's encoder."""
    layers, folder = LAYERS[table.scale], "whole"
    if row.module == M3:
        flagfile, steps, evaluations = "m3_xnli15_warm", STEPS[table.scale], 5
        own = [f"--discriminator_layers={layers}", f"--generator_layers={layers}"]
        own += [f"--generators={FEWER}"] * (table.scale == TINY)
        folder = "whole" if cluster == "whole" else "discriminator"
    else:
        flagfile, evaluations = "bert_xnli15_warm", 2
        steps = CHEAPER * STEPS[table.scale]
        own = [f"--layers={layers}"]
        own += [f"--languages={FEWER.replace('|', ' ')}"] * (table.scale == TINY)
    own += [
        f"--steps={steps}",
        f"--head_warmup_steps={steps // HEADS_ALONE}",
        f"--eval_every={steps // evaluations}",
        f"--checkpoint_every={steps // 2}",
        *RECIPE,
        f"--cluster={cluster}",
        f"--seed={seed}",
    ]
    name = f"{row.key}-{cluster}-seed{seed}"
    return table_runs.Run(
        name,
        row.module,
        (*table.arguments(table_runs.flagfile(flagfile)), *own),
        makes=f"{folder}/encoder",
    )


def fine_tuning_run(
    row: Row, table: config.Table, runs: table_runs.Runs, seed: str
) -> table_runs.Run:
    """Describes the run that measures a row's accuracies."""
    made_by, encoder = None, f"--encoder_layers={LAYERS[table.scale]}"
    if row.module:
        made_by = pretraining_run(row, table, seed)
        encoder = f"--encoder={runs.made(made_by.name)}"
    own = (*FINE_TUNING, *OWN[table.scale], encoder, f"--seed={seed}")
    return table_runs.Run(
        f"xnli-{row.key}-seed{seed}",
        xnli_rows.MODULE,
        (*table.arguments(table_runs.flagfile("xnli_warm")), *own),
        after=made_by,
    )


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    rows, marks = [], {}
    for row in ROWS:
        made: dict[str, Any] = {}
        if row.module:
            pretraining = functools.partial(pretraining_run, row, table)
            made = runs.of_seeds(pretraining, table.seeds)
        fine_tuning = functools.partial(fine_tuning_run, row, table, runs)
        done = runs.of_seeds(fine_tuning, table.seeds)
        marks[row.name] = {seed: each["right"] for seed, each in done.items()}
        rows.append(
            {
                "name": row.name,
                **xnli_rows.means([each["summary"] for each in done.values()]),
                "pretraining": [
                    _pretraining_figures(each["summary"]) for each in made.values()
                ],
            }
        )
    for row in rows:
        row["against"] = {
            other.name: xnli_rows.compare(marks[row["name"]], marks[other.name])
            for other in (AS_IT_COMES, MLM)
            if other.name != row["name"]
        }
    same = {}
    if table.scale == "six":
        first = table.seeds[0]
        whole, across = (
            runs.result(pretraining_run(WHOLE, table, first, cluster))["made"]
            for cluster in ("whole", "all")
        )
        same = {first: whole == across != {}}  # {}: no folder was left
    return {"layers": LAYERS[table.scale], "rows": rows, "across_is_same": same}


def _pretraining_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the table's figures of a pre-training run: first and last."""
    found: dict[str, Any] = {"seconds": summary["seconds"]}
    if "probes" not in summary:
        (held_out,) = summary["held_out"].values()
        ends = [m3_report.mean(held_out[end]["loss"].values()) for end in (0, -1)]
        return found | {"steps": held_out[-1]["step"], "mlm_loss": ends}
    ends = summary["held_out"][0], summary["held_out"][-1]
    gaps = [
        m3_report.mean(each["translation_gap"].values()) for each in summary["probes"]
    ]
    return found | {
        "steps": ends[-1]["step"],
        "gap": [gaps[0], gaps[-1]],
        **{
            figure: [m3_report.mean_of(each, figure) for each in ends]
            for figure in m3_report.FIGURES
        },
    }


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record under the paper's rows."""
    rows = record["rows"]
    compared = [
        each["name"]
        for each in rows
        if any(each["name"] in other["against"] for other in rows)
    ]
    pairs, tested = (
        ", ".join(f"{number:,}" for number in sorted({row[name] for row in rows}))
        for name in ("pairs", "rows")
    )
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        _accuracies(rows),
        *(_against(rows, name) for name in compared),
        f"Fine-tuned on {pairs} pairs, tested on {tested} in each language, the same"
        " for all seeds: ± leaves out how much other test pairs would change.",
        _pretraining(rows),
        *(_same(each) for each in record["across_is_same"].values()),
        _warnings(rows),
    )


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> str:
    known = sweep.PAPER["table1"]
    languages = known["languages"]
    cells = [
        [
            f"paper: {row['model']}",
            *(f"{each:.1f}" for each in (*row["accuracy"], row["average"])),
            "",
        ]
        for row in known["rows"]
    ]
    for row in rows:
        spread = [_spread(row, each) for each in (*languages, xnli.AVERAGE)]
        cells.append([row["name"], *spread, str(row["seeds"])])
    return report.table(["encoder", *languages, "average", "seeds"], cells)


def _spread(row: Mapping[str, Any], name: str) -> str:
    mean = 100 * row["accuracy"][name]
    if row["seeds"] == 1:
        return f"{mean:.1f}"
    return sweep.mean_and_error(mean, 100 * row["deviation"][name], ".1f")


def _against(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Renders the differences from the row of this name, in points."""

    def apart(group: str, row: Mapping[str, Any]) -> str:
        found = row["against"][name][group]
        low, high = (100 * edge for edge in found["interval"])
        return f"{100 * found['mean']:+.2f} ({low:+.2f} to {high:+.2f})"

    def by_seed(group: str, row: Mapping[str, Any]) -> list[float]:
        return [100 * each for each in row["against"][name][group]["by_seed"]]

    columns = [sweep.Column(f"points above: {name}", "name")]
    for group, title in (
        ("all", "average (95 % of draws of test rows)"),
        ("far", ", ".join(xnli_rows.FAR)),
    ):
        columns += [
            sweep.Column(title, functools.partial(apart, group)),
            sweep.Column("seed by seed", functools.partial(by_seed, group), "+.1f"),
        ]
    return sweep.table(
        columns, [row for row in rows if name in row["against"]], "lrlrl"
    )


def _same(is_same: bool) -> str:
    return (
        "With the first seed, with which alone it was tried, M3 across clusters (four"
        f" processes) leaves {'byte for byte' if is_same else '**not**'} the encoder"
        " that M3 in one process leaves."
    )


PRETRAINING = {  # column -> the figure of a pre-training run: its first and its last
    "fake tokens": ("fake_token_rate", ".1%"),
    "RTD AUC": ("rtd_auc", ".3f"),
    "sampled right": ("sampled_mlm_accuracy", ".1%"),
    "CLM right": ("clm_accuracy", ".1%"),
    "most frequent": ("unigram_accuracy", ".1%"),
    "translation gap": ("gap", ".3f"),
    "MLM loss": ("mlm_loss", ".3f"),
}


def _pretraining(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the runs that made the rows' encoders."""
    made = [
        {"name": row["name"], **each} for row in rows for each in row["pretraining"]
    ]

    def ends(figure: str, form: str, row: Mapping[str, Any]) -> str:
        return " → ".join(report.figure(each, form) for each in row.get(figure, ()))

    columns = [
        sweep.Column("pre-training, mean of languages", "name"),
        sweep.Column("steps", "steps"),
        sweep.Column("minutes", lambda row: row["seconds"] / 60, ".0f"),
        *(
            sweep.Column(f"{name}, first → last", functools.partial(ends, figure, form))
            for name, (figure, form) in PRETRAINING.items()
            if any(figure in each for each in made)
        ),
    ]
    return sweep.table(columns, made)


def _warnings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders each kind of warning with its languages, over all seeds."""
    found = []
    for row in rows:
        languages: dict[str, dict[str, None]] = {}
        for line in row["warnings"]:
            language, _, warning = line.partition(": ")
            kind = "no better than a guess" if "a guess" in warning else warning
            languages.setdefault(kind, {})[language] = None
        name = row["name"] + ", with some seed" * (row["seeds"] > 1)
        found += [
            f"- {name}: {kind} in {', '.join(each)}" for kind, each in languages.items()
        ]
    return "\n".join(found)


SWEEP = sweep.Sweep(
    "table1",
    record,
    markdown,
    figures=xnli_rows.figures,
    scales=list(LAYERS),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
