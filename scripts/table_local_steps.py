"""Holds local steps against an all-reduce at every step: loss, bytes, time, XNLI.

    python -m scripts.table_local_steps --data_dir=../shared/data
    python -m scripts.table_local_steps --scale=small --data_dir=../shared/data
    python -m scripts.table_local_steps --scale=quick --data_dir=../shared/data

The second is of a smaller model and less text, for many rows; the third shows in
minutes how the table is made, and measures nothing.
Every row trains the same model on the same batches in the same order; only what the
clusters exchange differs. Rows of quality run in one process (`--cluster=whole`), which
several clusters equal to the last bit; the row of time runs two over an emulated line.
"""

import functools
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.bert import report as bert_report
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.training import diloco, metrics
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

BERT, XNLI = "experiments.pretrain_bert", "experiments.finetune_xnli"
VARIANT = "scripts.local_variant"
BATCH = 192  # rows of a step, of all clusters together
LINE = "60mbit,15ms"
EVERY = 10  # steps of each record of the run over a line


class Size(NamedTuple):
    """The numbers of steps and pairs of a scale."""

    steps: int = 1000
    timed: int = 900
    """Of the run over a line."""
    pairs: int = 40_000
    """Of the fine-tuning; 0 for none."""
    flags: tuple[str, ...] = ()
    """In the place of those of the flagfile."""

    @property
    def eval_every(self) -> int:
        """The steps between evaluations in the fine-tuning, which has two epochs."""
        return self.pairs // 64

    @property
    def buckets(self) -> str:
        """The lengths of pairs in the fine-tuning, up to the encoder's."""
        return "20,28,32" if self.flags else "20,28,36,48,64"


SMALLER = (
    *("--model_size=nano", "--vocab_size=2000", "--max_length=32", "--dtype=float32"),
    *("--languages=en de fr es", "--warmup_steps=60"),
)
SIZES = {
    "": Size(),
    "small": Size(steps=600, timed=300, pairs=0, flags=SMALLER),
    "quick": Size(steps=60, timed=120, pairs=1280, flags=SMALLER),
}
"""Scale -> numbers."""


class Row(NamedTuple):
    """A row of the table."""

    name: str
    """For a person."""
    key: str
    """In the names of files."""
    clusters: int
    arguments: tuple[str, ...] = ()
    """Flags beside the number of clusters and the rows of each."""
    is_fine_tuned: bool = False
    rule: str = ""
    """Of `local_variant`; empty for what `pretrain_bert` does."""
    batch: int = BATCH
    against: str = ""
    """The key of the row that it is compared with; REFERENCE if empty."""
    is_tried: bool = True
    """True for a way that was tried: with FEW seeds, and not in the smallest scale."""


FEW = 2
OUTER = ("--outer_learning_rate=1.0",)
SPARSE = (
    *("--sync=sparse", "--inner_steps=3", "--fragments=1", "--delay=0"),
    "--unsent=parameters",
)
ALONE, FASTER = ("--sync=allreduce",), "--learning_rate=3e-3"
EVERY_STEP = (
    *("--outer_learning_rate=1.0", "--inner_steps=1", "--fragments=1", "--delay=0"),
    "--delta_codec=identity",
)
SHORT = ("--outer_learning_rate=1.0", "--inner_steps=15", "--fragments=1", "--delay=2")
UNEQUAL = (
    *("--outer_learning_rate=0.7", "--outer_momentum=0.9"),
    *("--fragments=1", "--delay=0"),
)
REFERENCE = "all_reduce"
"""The key of the row that the others are compared with."""
ROWS = (
    Row("all-reduce", REFERENCE, 1, ALONE, True, is_tried=False),
    Row("streaming, e3m0", "streaming2", 2, OUTER, True, is_tried=False),
    Row("streaming, e3m0", "streaming4", 4, OUTER, is_tried=False),
    Row("sparse, 146x, unsent in parameters", "sparse2", 2, SPARSE),
    Row("sparse, 146x, unsent in parameters", "sparse4", 4, SPARSE),
    *(
        Row(
            name,
            f"{rule}{count}",
            count,
            OUTER,
            rule=rule,
            is_tried=rule != "mended",  # it came nearest with few seeds
        )
        for rule, name in {
            "mended": "second moments scaled by the deltas' ratio",
            "divided": "second moments divided by K",
            "averaged": "second moments averaged at rounds, 4 bits",
            "averaged_divided": "averaged and divided",
            "chosen": "fragment by its change, delay compensated (CoCoDC)",
        }.items()
        for count in ((2, 4) if rule in ("mended", "averaged_divided") else (2,))
    ),
    Row("low-rank moments (LoRDO)", "low_rank1", 1, ALONE, rule="low_rank"),
    Row(
        "low-rank moments (LoRDO)",
        "low_rank2",
        2,
        OUTER,
        rule="low_rank",
        against="low_rank1",
    ),
    *(
        Row(
            f"{name}, rows in all: {rows}",
            f"{key}{count}-rows{rows}",
            count,
            given,
            batch=rows,
            against=f"{REFERENCE}1-rows{rows}",
        )
        for rows in (96, 384)
        for name, key, count, given in (
            ("all-reduce", REFERENCE, 1, ALONE),
            ("streaming, e3m0", "streaming", 2, OUTER),
        )
    ),
    Row("all-reduce, rate 3e-3", "all_reduce-rate3", 1, (*ALONE, FASTER)),
    Row(
        "streaming, e3m0, rate 3e-3",
        "streaming2-rate3",
        2,
        (*OUTER, FASTER),
        against="all_reduce-rate3",
    ),
    Row("averaging at every step", "every2", 2, EVERY_STEP),
    Row(
        "averaging at every step, second moments divided by K",
        "every2-divided",
        2,
        EVERY_STEP,
        rule="divided",
    ),
    Row("rounds of 15 steps", "short2", 2, SHORT),
    Row(
        "rounds of 15 steps, second moments divided by K",
        "short2-divided",
        2,
        SHORT,
        rule="divided",
    ),
    Row("one of two clusters, alone", "alone", 1, ALONE, batch=BATCH // 2),
    Row("unequal, waiting", "unequal", 2, UNEQUAL, rule="unequal"),
    Row(
        "unequal, at once",
        "unequal_late",
        2,
        UNEQUAL,
        rule="unequal_late",
        against="unequal",
    ),
    Row(
        "unequal, at once, aligned (HeLoCo)",
        "unequal_aligned",
        2,
        UNEQUAL,
        rule="unequal_aligned",
        against="unequal",
    ),
)


def base(table: config.Table) -> tuple[str, ...]:
    """Returns the flags of all runs."""
    arguments = table.arguments(table_runs.flagfile("bert_xnli15_tiny"))
    size = SIZES[table.scale]
    steps = (f"--steps={size.steps}", f"--eval_every={size.steps // 10}")
    return (*arguments, *size.flags, *steps)


def run_of(row: Row, table: config.Table, seed: str) -> table_runs.Run:
    """Describes the run of a row."""
    name = f"{row.key}-seed{seed}"
    return table_runs.Run(
        name,
        VARIANT if row.rule else BERT,
        (
            *base(table),
            *(
                f"--clusters={row.clusters}",
                f"--batch_size={row.batch // row.clusters}",
            ),
            *("--cluster=whole", f"--seed={seed}"),
            f"--checkpoint_every={SIZES[table.scale].steps}",
            *row.arguments,
            *([f"--rule={row.rule}"] if row.rule else []),
        ),
        makes="whole/encoder" if row.is_fine_tuned else "",
    )


def fine_tuning_of(
    row: Row, table: config.Table, runs: table_runs.Runs, seed: str
) -> table_runs.Run:
    """Describes the run that fine-tunes a row's encoder on English pairs."""
    before, size = run_of(row, table, seed), SIZES[table.scale]
    return table_runs.Run(
        f"xnli-{row.key}-seed{seed}",
        XNLI,
        (
            *table.arguments(table_runs.flagfile("xnli_warm")),
            f"--encoder={runs.made(before.name)}",
            *("--languages=en", f"--max_train_pairs={size.pairs}", "--epochs=2"),
            *("--max_test_pairs=300", "--nofreeze_embeddings", "--layer_decay=1"),
            f"--length_buckets={size.buckets}",
            *("--learning_rate=5e-4", "--checkpoint_selection=last"),
            f"--eval_every={size.eval_every}",
            *(f"--checkpoint_every={2 * size.eval_every}", f"--seed={seed}"),
        ),
        after=before,
    )


def time_run(table: config.Table) -> table_runs.Run:
    """Describes the run over an emulated line."""
    timed = SIZES[table.scale].timed
    own = (f"--steps={timed}", f"--eval_every={timed}", f"--checkpoint_every={timed}")
    over = ("--cluster=all", f"--wan={LINE}", f"--log_every={EVERY}")
    return table_runs.Run("time", BERT, (*base(table), *own, *over))


def adapters_run(table: config.Table) -> table_runs.Run:
    """Describes a run of which adapters and the head alone train, for its bytes."""
    own = (
        *("--hot_start=e5-small", "--trains=adapters_and_head", "--cluster=whole"),
        *("--batch_size=4", "--steps=60", "--eval_every=60", "--eval_batches=1"),
        "--checkpoint_every=60",
    )
    return table_runs.Run("adapters", BERT, (*base(table), *own))


def adapters_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns what trains of a model with adapters, and the bytes that cross."""
    summary = result["summary"]
    rounds, bytes_ = summary["clusters"][0]["rounds"], summary["bytes"]
    steps = summary["clusters"][0]["last_step"]
    return {
        "parameters": rounds["parameters"],
        "bytes_a_step": bytes_["sent"] / summary["flags"]["clusters"] / steps,
        "fewer": bytes_["fewer"],
    }


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the figures of a finished run: its summary, and the times of its steps."""
    summary = report.read_summary(workdir)
    if run.name != "time":
        return {"summary": summary}
    names = [each["cluster"] for each in summary["clusters"]]
    records = [metrics.read(run_folder.of_cluster(workdir, name)) for name in names]
    rule = local_steps_of(summary["flags"])
    return {"summary": summary, "step": [step_seconds(each, rule) for each in records]}


def local_steps_of(settings: Mapping[str, Any]) -> diloco.Config:
    """Returns the schedule of a run's rounds."""
    names = ("inner_steps", "fragments", "delay")
    return diloco.Config(**{name: settings[name] for name in names})


def step_seconds(
    records: Sequence[Mapping[str, Any]], rule: diloco.Config
) -> dict[str, float]:
    """Returns the seconds of a step: of all, and of those in which nothing is due.

    Of a cluster's metrics, every EVERY steps, the first third is left out.
    """
    steps = [each for each in records if "loss" in each]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for before, after in itertools.pairwise(steps[len(steps) // 3 :]):
        numbers = range(before["step"] + 1, after["step"] + 1)
        is_due = any(
            each is not None
            for step in numbers
            for each in (rule.sent_after(step), rule.applied_after(step))
        )
        # A record is written at its step's end, before what is due after the next one.
        seconds[is_due].append((after["time"] - before["time"]) / len(numbers))
    every = seconds[True] + seconds[False]
    return {
        "all": statistics.mean(every),
        "between": statistics.mean(seconds[False]),
    }


def last_loss(result: Mapping[str, Any]) -> float:
    """Returns nats a held-out token, mean of languages, of the last evaluation."""
    if "held_out" not in result["summary"]:  # of `local_variant`
        return result["summary"]["losses"][-1][1]
    (found,) = result["summary"]["held_out"].values()
    return bert_report.mean(found[-1]["loss"])


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    rows = []
    losses: dict[str, dict[str, float]] = {}
    for row in ROWS:
        if row.is_tried and table.scale == "quick":
            continue
        seeds = table.seeds[:FEW] if row.is_tried else table.seeds
        done = runs.of_seeds(functools.partial(run_of, row, table), seeds)
        losses[row.key] = {seed: last_loss(each) for seed, each in done.items()}
        one = done[table.seeds[0]]["summary"]
        tuned: dict[str, Any] = {}
        if row.is_fine_tuned and SIZES[table.scale].pairs:
            fine_tuning = functools.partial(fine_tuning_of, row, table, runs)
            tuned = runs.of_seeds(fine_tuning, table.seeds)
        settings = ("clusters", "inner_steps", "fragments", "delay")
        rows.append(
            {
                "name": row.name,
                "key": row.key,
                **{name: one["flags"][name] for name in settings},
                "is_all_reduce": row.clusters == 1,
                "losses": losses[row.key],
                "difference": difference(losses, row.key, row.against or REFERENCE),
                "against": next(
                    (each.name for each in ROWS if each.key == row.against), ""
                ),
                "rows": row.batch,
                "bytes": one.get("bytes", {}),
                # English dev pairs, after the last evaluation.
                "xnli": [
                    each["summary"]["dev"][-1]["accuracy"] for each in tuned.values()
                ],
            }
        )
    timed = runs.result(time_run(table))
    return {
        "rows": rows,
        "steps": SIZES[table.scale].steps,
        "batch": BATCH,
        "line": LINE,
        "adapters": adapters_of(runs.result(adapters_run(table))),
        "time": {
            **{
                name: statistics.mean(each[name] for each in timed["step"])
                for name in ("all", "between")
            },
            **{name: timed["summary"]["bytes"][name] for name in ("sent", "formula")},
        },
    }


def difference(
    losses: Mapping[str, Mapping[str, float]], key: str, against: str
) -> dict[str, float] | None:
    """Returns the relative difference of a row's loss, paired by seed.

    None of a row that it would be compared with itself.
    """
    if key == against:
        return None
    pairs = [loss / losses[against][seed] - 1 for seed, loss in losses[key].items()]
    return {
        "mean": statistics.mean(pairs),
        "standard_error": sweep.standard_error(pairs) if len(pairs) > 1 else 0.0,
        "seeds": len(pairs),
    }


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""
    time, adapters = record["time"], record["adapters"]
    columns = [
        sweep.Column("exchange", "name"),
        sweep.Column("clusters", lambda row: str(row["clusters"])),
        sweep.Column("H, P, τ", _schedule),
        sweep.Column(
            "held-out loss", lambda row: statistics.mean(row["losses"].values()), ".4f"
        ),
        sweep.Column("seeds", lambda row: str(len(row["losses"]))),
        sweep.Column("difference", _difference),
        sweep.Column("bytes a token", functools.partial(_bytes, "per_token", ",.2f")),
        sweep.Column("times fewer", functools.partial(_bytes, "fewer", ",.0f")),
        sweep.Column("XNLI en dev", lambda row: sweep.spread(row["xnli"], ".1%")),
    ]
    return report.join(
        report.heading(record, report.seeds(record)),
        f"{record['steps']} steps of {record['batch']} rows in all, whatever the number"
        " of clusters: the same batches in the same order. The loss is that on held-out"
        " text, nats a masked token, mean of the languages and of the seeds;"
        " differences are paired by seed, with their standard error.",
        sweep.table(columns, record["rows"], "llllllrrl"),
        f"Two clusters over {record['line']}: {1000 * time['all']:.1f} ms a step,"
        f" {1000 * time['between']:.1f} ms where no round is due;"
        f" {time['sent'] / time['formula']:.3f} times the formula's bytes.",
        "Adapters and the head alone, on a frozen e5-small of 12 layers"
        f" (`--trains=adapters_and_head`): {adapters['parameters']:,} parameters train,"
        f" and {adapters['bytes_a_step']:,.0f} bytes a step leave each of two clusters,"
        f" {adapters['fewer']:,.0f} times fewer than an all-reduce of these.",
    )


def _schedule(row: Mapping[str, Any]) -> str:
    if row["is_all_reduce"]:
        return "1"
    return f"{row['inner_steps']}, {row['fragments']}, {row['delay']}"


def _difference(row: Mapping[str, Any]) -> str:
    found = row["difference"]
    if found is None:
        return ""
    against = row.get("against")
    of = f" of {against}" if against else ""
    if found["seeds"] == 1:
        return f"{found['mean']:+.2%}{of} (1 seed)"
    error = found["standard_error"]
    return sweep.mean_and_error(found["mean"], error, "+.2%") + of


def _bytes(name: str, form: str, row: Mapping[str, Any]) -> str:
    return f"{row['bytes'][name]:{form}}" if row["bytes"] else ""


SWEEP = sweep.Sweep(
    "local_steps",
    record,
    markdown,
    figures=figures,
    scales=list(SIZES),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
