"""Holds local steps against an all-reduce at every step: loss, bytes, time, XNLI.

    python -m scripts.table_local_steps --data_dir=../shared/data

Every row trains the same model on the same batches in the same order; only what the
clusters exchange differs. Rows of quality run in one process (`--cluster=whole`), which
several clusters equal to the last bit; the row of time runs two over an emulated line.
"""

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.bert import report as bert_report
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.training import diloco, metrics
from scripts.tables import config, local_steps_markdown
from scripts.tables import runs as table_runs

BERT, XNLI = "experiments.pretrain_bert", "experiments.finetune_xnli"
SEEDS = 3
BATCH = 192  # rows of a step, of all clusters together
STEPS = 1000
LINE = "60mbit,15ms"
TIMED, EVERY = 900, 10  # steps of the run over a line, and of each record


class Row(NamedTuple):
    """A row of the table."""

    name: str
    """For a person."""
    key: str
    """In the names of files."""
    clusters: int
    arguments: tuple[str, ...] = ()
    """Flags beside the number of clusters and the rows of each."""
    reference: str = ""
    """The key of the row that it is compared with; empty for none."""
    is_fine_tuned: bool = False
    is_explored: bool = False
    """True for a way that was tried: the first seed alone."""

    def seeds(self, table: config.Table) -> Sequence[str]:
        """Returns the seeds of this row."""
        return table.seeds[:1] if self.is_explored else table.seeds


ALL_REDUCE = Row("all-reduce", "all_reduce", 1, ("--sync=allreduce",), "", True)
MUON = ("--optimizer=muon", "--learning_rate=5e-3")
FASTER = ("--learning_rate=3e-3",)
OUTER = ("--outer_learning_rate=1.0",)
AVERAGING = (*OUTER, "--fragments=1", "--delay=0", "--outer_momentum=0", "--mixing=0")
SPARSE = ("--sync=sparse", "--inner_steps=3", "--fragments=1", "--delay=0")
KEPT = (*SPARSE, "--unsent=parameters")
SENDERS = (
    *(*SPARSE, "--sparse_average=senders"),
    "--delta_codec=error_feedback(sparse_loco(64, 4096))",
)
ROWS = (
    ALL_REDUCE,
    Row("streaming, e3m0", "streaming2", 2, OUTER, ALL_REDUCE.key, True),
    Row("streaming, e3m0", "streaming4", 4, OUTER, ALL_REDUCE.key),
    Row("sparse, 146x, unsent in parameters", "sparse2", 2, KEPT, ALL_REDUCE.key),
    Row("sparse, 146x, unsent in parameters", "sparse4", 4, KEPT, ALL_REDUCE.key),
    Row(
        *("all-reduce, Muon", "muon", 1, ("--sync=allreduce", *MUON)),
        *(ALL_REDUCE.key, False, True),
    ),
    Row(
        *("streaming, e3m0, Muon", "muon2", 2, (*OUTER, *MUON)),
        *("muon", False, True),
    ),
    Row(
        *("all-reduce, rate 3e-3", "faster", 1, ("--sync=allreduce", *FASTER)),
        *(ALL_REDUCE.key, False, True),
    ),
    Row(
        *("streaming, e3m0, rate 3e-3", "faster2", 2, (*OUTER, *FASTER)),
        *("faster", False, True),
    ),
    Row(
        *("averaging of parameters", "averaging20", 2),
        *((*AVERAGING, "--inner_steps=20"), ALL_REDUCE.key, False, True),
    ),
    Row(
        *("averaging of parameters", "averaging1", 2),
        *((*AVERAGING, "--inner_steps=1"), ALL_REDUCE.key, False, True),
    ),
    Row(
        *("one of two clusters, alone", "alone", 1),
        *(("--sync=allreduce", f"--batch_size={BATCH // 2}"), ALL_REDUCE.key),
        *(False, True),
    ),
    Row(
        *("sparse, SparseLoCo's residual", "decay2", 2, SPARSE, ALL_REDUCE.key),
        *(False, True),
    ),
    Row(
        *("sparse, residual kept, by senders", "senders2", 2, SENDERS),
        *(ALL_REDUCE.key, False, True),
    ),
)


def base(table: config.Table) -> tuple[str, ...]:
    """Returns the flags of all runs."""
    arguments = table.arguments(table_runs.flagfile("bert_xnli15_tiny"))
    return (*arguments, f"--steps={STEPS}", f"--eval_every={STEPS // 10}")


def run_of(row: Row, seed: str, table: config.Table) -> table_runs.Run:
    """Describes the run of a row."""
    name = f"{row.key}-seed{seed}"
    made = table_runs.Folder(name, "whole/encoder") if row.is_fine_tuned else None
    return table_runs.Run(
        name,
        BERT,
        (
            *base(table),
            *(f"--clusters={row.clusters}", f"--batch_size={BATCH // row.clusters}"),
            *("--cluster=whole", f"--seed={seed}", f"--checkpoint_every={STEPS}"),
            *row.arguments,
        ),
        makes=made,
    )


def fine_tuning_of(
    row: Row, seed: str, table: config.Table, runs: table_runs.Runs
) -> table_runs.Run:
    """Describes the run that fine-tunes a row's encoder on English pairs."""
    before = run_of(row, seed, table)
    return table_runs.Run(
        f"xnli-{row.key}-seed{seed}",
        XNLI,
        (
            *table.arguments(table_runs.flagfile("xnli_warm")),
            f"--encoder={runs.made(before.name)}",
            *("--languages=en", "--max_train_pairs=40000", "--epochs=2"),
            *("--max_test_pairs=300", "--nofreeze_embeddings", "--layer_decay=1"),
            "--length_buckets=20,28,36,48,64",  # it has 64 positions
            *("--learning_rate=5e-4", "--checkpoint_selection=last"),
            *("--eval_every=625", "--checkpoint_every=1250", f"--seed={seed}"),
        ),
        after=before,
    )


def time_run(table: config.Table) -> table_runs.Run:
    """Describes the run over an emulated line."""
    flags = (f"--steps={TIMED}", f"--eval_every={TIMED}", f"--checkpoint_every={TIMED}")
    return table_runs.Run(
        "time",
        BERT,
        (
            *base(table),
            *flags,
            "--cluster=all",
            f"--wan={LINE}",
            f"--log_every={EVERY}",
        ),
    )


def adapters_run(table: config.Table) -> table_runs.Run:
    """Describes a run of which adapters and the head alone train, for its bytes."""
    return table_runs.Run(
        "adapters",
        BERT,
        (
            *base(table),
            *("--hot_start=e5-small", "--trains=adapters_and_head", "--cluster=whole"),
            *("--batch_size=4", "--steps=60", "--eval_every=60", "--eval_batches=1"),
            "--checkpoint_every=60",
        ),
    )


def adapters_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns what trains of a model with adapters, and the bytes that cross."""
    summary = result["summary"]
    rounds, bytes_ = summary["clusters"][0]["rounds"], summary["bytes"]
    steps = summary["clusters"][0]["last_step"]
    return {
        "parameters": rounds["parameters"],
        "bytes_a_step": bytes_["sent"] / summary["flags"]["clusters"] / steps,
        "fewer": bytes_["fewer"],
        "seconds": summary["seconds"],
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

    Args:
      records: a cluster's metrics, every EVERY steps; the first third is left out.
      rule: of the rounds.
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


def final_loss(result: Mapping[str, Any]) -> float:
    """Returns the last loss on held-out text, mean of the languages, in nats."""
    (found,) = result["summary"]["held_out"].values()
    return bert_report.mean(found[-1]["loss"])


def curve(result: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Returns (step, loss on held-out text) of every evaluation."""
    (found,) = result["summary"]["held_out"].values()
    return [(each["step"], bert_report.mean(each["loss"])) for each in found]


def gather(
    runs: table_runs.Runs, table: config.Table, losses: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """Gathers the rows, of the runs that have ended.

    Args:
      runs: with their figures.
      table: its seeds.
      losses: filled with row -> seed -> final loss.
    """
    rows = []
    for row in ROWS:
        seeds = row.seeds(table)
        found = {seed: runs.found(run_of(row, seed, table)) for seed in seeds}
        done = {seed: each for seed, each in found.items() if each is not None}
        if not done:
            continue
        losses[row.key] = {seed: final_loss(each) for seed, each in done.items()}
        one = next(iter(done.values()))["summary"]
        tuned = [
            runs.found(fine_tuning_of(row, seed, table, runs))
            for seed in done
            if row.is_fine_tuned
        ]
        accuracies = [english_dev(each) for each in tuned if each is not None]
        rows.append(
            {
                "name": row.name,
                "key": row.key,
                "reference": row.reference,
                **{
                    name: one["flags"][name]
                    for name in ("clusters", "inner_steps", "fragments", "delay")
                },
                "is_all_reduce": row.clusters == 1,
                "is_explored": row.is_explored,
                "losses": losses[row.key],
                "difference": difference(losses, row),
                "bytes": one["bytes"],
                "xnli": accuracies,
                "curve": curve(next(iter(done.values()))),
            }
        )
    return rows


def english_dev(result: Mapping[str, Any]) -> float:
    """Returns the accuracy on XNLI's English dev pairs after fine-tuning."""
    return result["summary"]["dev"][-1]["accuracy"]


def difference(
    losses: Mapping[str, Mapping[str, float]], row: Row
) -> dict[str, float] | None:
    """Returns the relative difference of a row's loss, paired by seed.

    Returns:
      mean, and its standard error; None if there is nothing to compare with.
    """
    if row.reference not in losses:
        return None
    reference = losses[row.reference]
    pairs = [
        loss / reference[seed] - 1
        for seed, loss in losses[row.key].items()
        if seed in reference
    ]
    if not pairs:
        return None
    spread = statistics.stdev(pairs) if len(pairs) > 1 else 0.0
    return {
        "mean": statistics.mean(pairs),
        "standard_error": spread / len(pairs) ** 0.5,
        "seeds": len(pairs),
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    for seed in table.seeds:
        for row in ROWS:
            if not row.is_explored:
                runs.result(run_of(row, seed, table))
            if row.is_fine_tuned:
                runs.result(fine_tuning_of(row, seed, table, runs))
    timed = runs.result(time_run(table))
    adapters = adapters_of(runs.result(adapters_run(table)))
    for row in ROWS:
        if row.is_explored:
            runs.result(run_of(row, table.seeds[0], table))
    rows = gather(runs, table, {})
    return {
        **runs.provenance(table.seeds),
        "rows": rows,
        "steps": STEPS,
        "batch": BATCH,
        "line": LINE,
        "adapters": adapters,
        "time": {
            **{
                name: statistics.mean(each[name] for each in timed["step"])
                for name in ("all", "between")
            },
            **{name: timed["summary"]["bytes"][name] for name in ("sent", "formula")},
        },
    }


def main() -> int:
    """Does the missing runs; writes and prints the table, and draws the picture."""
    table = config.from_flags("local_steps", [], SEEDS)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, figures, results=table.results)
        result = record(runs, table)
    local_steps_markdown.picture(result, table.out.with_suffix(".png"))
    table_runs.write(result, local_steps_markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["scale", *config.FLAGS])
