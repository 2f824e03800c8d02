"""Holds local steps against an all-reduce at every step: loss, bytes, time, XNLI.

    python -m scripts.table_local_steps --data_dir=../shared/data
    python -m scripts.table_local_steps --scale=quick --data_dir=../shared/data

The second shows in minutes how the table is made, of a smaller model and less text, and
measures nothing.
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
BATCH = 192  # rows of a step, of all clusters together
LINE = "60mbit,15ms"
EVERY = 10  # steps of each record of the run over a line


class Size(NamedTuple):
    """The numbers of steps and pairs of a scale."""

    steps: int = 1000
    timed: int = 900  # of the run over a line
    pairs: int = 40_000  # of the fine-tuning
    buckets: str = "20,28,36,48,64"  # lengths of pairs there, up to the encoder's
    flags: tuple[str, ...] = ()  # in the place of those of the flagfile

    @property
    def eval_every(self) -> int:
        """The steps between evaluations in the fine-tuning, which has two epochs."""
        return self.pairs // 64


SMALLER = (
    *("--model_size=nano", "--vocab_size=2000", "--max_length=32", "--dtype=float32"),
    *("--languages=en de fr es", "--warmup_steps=10"),
)
QUICK = Size(60, timed=60, pairs=1280, buckets="20,28,32", flags=SMALLER)
SIZES = {"": Size(), "quick": QUICK}  # scale -> numbers


class Row(NamedTuple):
    """A row of the table."""

    name: str  # for a person
    key: str  # in the names of files
    clusters: int
    arguments: tuple[str, ...] = ()  # beside the number of clusters and rows of each
    is_fine_tuned: bool = False


OUTER = ("--outer_learning_rate=1.0",)
REFERENCE = "all_reduce"  # the key of the row that the others are compared with
ROWS = (
    Row("all-reduce", REFERENCE, 1, ("--sync=allreduce",), True),
    Row("streaming, e3m0", "streaming2", 2, OUTER, True),
    Row("streaming, e3m0", "streaming4", 4, OUTER),
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
        BERT,
        (
            *base(table),
            *(f"--clusters={row.clusters}", f"--batch_size={BATCH // row.clusters}"),
            *("--cluster=whole", f"--seed={seed}"),
            f"--checkpoint_every={SIZES[table.scale].steps}",
            *row.arguments,
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
    (found,) = result["summary"]["held_out"].values()
    return bert_report.mean(found[-1]["loss"])


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    rows = []
    losses: dict[str, dict[str, float]] = {}
    for row in ROWS:
        done = runs.of_seeds(functools.partial(run_of, row, table), table.seeds)
        losses[row.key] = {seed: last_loss(each) for seed, each in done.items()}
        one = done[table.seeds[0]]["summary"]
        tuned: dict[str, Any] = {}
        if row.is_fine_tuned:
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
                "difference": difference(losses, row.key),
                "bytes": one["bytes"],
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
    losses: Mapping[str, Mapping[str, float]], key: str
) -> dict[str, float] | None:
    """Returns a row's relative loss difference, paired by seed; None of REFERENCE."""
    if key == REFERENCE:
        return None
    pairs = [loss / losses[REFERENCE][seed] - 1 for seed, loss in losses[key].items()]
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
        sweep.table(columns, record["rows"], "llllrrrl"),
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
    if found["seeds"] == 1:
        return f"{found['mean']:+.2%} (1 seed)"
    return sweep.mean_and_error(found["mean"], found["standard_error"], "+.2%")


def _bytes(name: str, form: str, row: Mapping[str, Any]) -> str:
    return "" if row["is_all_reduce"] else f"{row['bytes'][name]:{form}}"


SWEEP = sweep.Sweep(
    "local_steps",
    record,
    markdown,
    figures=figures,
    scales=list(SIZES),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
