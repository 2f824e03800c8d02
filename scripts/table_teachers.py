"""Holds a student with teachers in other clusters beside the same one without.

    python -m scripts.table_teachers --data_dir=../shared/data
    python -m scripts.table_teachers --scale=quick --data_dir=../shared/data

The second shows in minutes how the table is made, and measures nothing. Two teachers
are trained, each on two of the student's four languages. Students of a seed begin with
the same parameters and have the same batches with the same masks; what they learn from
differs.
"""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import shared_flags
from experiments.bert import report as bert_report
from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

BERT, DISTILL = "experiments.pretrain_bert", "experiments.distill"
STEPS = {"": (600, 300), "quick": (40, 20)}  # scale -> steps of a teacher, a student
GROUPS = ("en de", "fr es")  # languages of each teacher; the student reads all
ROWS = {  # name -> teachers and their weights; the others are compared with the first
    "none": (0, ""),
    f"one: {GROUPS[0]}": (1, ""),
    "two, weights equal": (2, "1,1"),
    "two, weights learned": (2, ""),
}


def bert_run(
    table: config.Table,
    name: str,
    steps: int,
    *flags: str,
    after: table_runs.Run | None = None,
) -> table_runs.Run:
    """Describes a run of pretrain_bert in one process, whose encoder others use."""
    whole = ("--cluster=whole", "--clusters=1", "--sync=allreduce", "--vocab_size=4000")
    arguments = (*base(table, steps), *whole, *flags)
    return table_runs.Run(name, BERT, arguments, makes="whole/encoder", after=after)


def base(table: config.Table, steps: int) -> tuple[str, ...]:
    """Returns the flags of all runs, of so many steps."""
    every = (f"--steps={steps}", f"--checkpoint_every={steps}", f"--eval_every={steps}")
    return (*table.arguments(table_runs.flagfile("distill_tiny")), *every)


def run_of(
    table: config.Table, runs: table_runs.Runs, count: int, weights: str, seed: str
) -> table_runs.Run:
    """Describes the run of a student with `count` teachers."""
    steps, languages = STEPS[table.scale][1], f"--languages={' '.join(GROUPS)}"
    if not count:
        own = ("--model_size=nano", languages, f"--seed={seed}")
        return bert_run(table, f"alone-seed{seed}", steps, *own)
    taught = teachers(table, runs)[:count]
    folders = ",".join(str(runs.made(each.name)) for each in taught)
    return table_runs.Run(
        f"{count}-{weights or 'learned'}-seed{seed}",
        DISTILL,
        (
            *base(table, steps),
            *(languages, pieces(table, runs), f"--seed={seed}"),
            *(f"--clusters={count}", f"--teachers={folders}"),
            f"--teacher_weights={weights}",
        ),
        after=taught[-1],
    )


def teachers(table: config.Table, runs: table_runs.Runs) -> list[table_runs.Run]:
    """Describes the runs of the teachers, whose pieces are those of a student alone."""
    found = [run_of(table, runs, 0, "", table.seeds[0])]
    for number, languages in enumerate(GROUPS):
        own = ("--model_size=tiny", f"--languages={languages}", "--seed=100")
        own += (pieces(table, runs),)
        name, steps = f"teacher{number}", STEPS[table.scale][0]
        found.append(bert_run(table, name, steps, *own, after=found[-1]))
    return found[1:]


def pieces(table: config.Table, runs: table_runs.Runs) -> str:
    """Returns the flag of the vocabulary that the first run has made."""
    folder = runs.made(run_of(table, runs, 0, "", table.seeds[0]).name)
    return f"--vocabulary={folder / 'spiece.model'}"


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads a finished run's summary, its last losses by language, and weights."""
    records = metrics.read(workdir / ("whole" if run.module == BERT else "student"))
    last = [each for each in records if "loss" in each][-1]
    return {
        "summary": report.read_summary(workdir),
        "loss": bert_report.held_out(records)[-1]["loss"],
        "weights": [last[name] for name in last if name.startswith("weight_")],
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    rows: list[dict[str, Any]] = []
    taught = []
    for name, (count, weights) in ROWS.items():
        if count and not taught:
            taught = [runs.result(each) for each in teachers(table, runs)]
        of_seed = functools.partial(run_of, table, runs, count, weights)
        done = list(runs.of_seeds(of_seed, table.seeds).values())
        losses = [bert_report.mean(each["loss"]) for each in done]
        alone = rows[0]["losses"] if rows else losses
        rows.append(
            {
                "name": name,
                "losses": losses,
                "differences": [a - b for a, b in zip(losses, alone, strict=True)],
                "groups": [
                    statistics.fmean(each["loss"][one] for each in done for one in part)
                    for part in map(str.split, GROUPS)
                ],
                "weights": [
                    statistics.fmean(found)
                    for found in zip(*(each["weights"] for each in done), strict=True)
                ],
                "bytes": crossed(done[0]["summary"]) if count else [],
            }
        )
    of_teachers = [bert_report.mean(each["loss"]) for each in taught]
    return {"steps": STEPS[table.scale], "teachers": of_teachers, "rows": rows}


def crossed(summary: Mapping[str, Any]) -> list[float]:
    """Returns the bytes that the student sends and receives in a step."""
    student = summary["clusters"][0]
    steps = student["last_step"] - student["first_step"] + 1
    return [student[f"bytes_{way}"] / steps for way in ("sent", "received")]


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""

    def part(row: Mapping[str, Any], number: int) -> float:
        return row["groups"][number]

    def apart(row: Mapping[str, Any]) -> str:
        found: Sequence[float] = row["differences"]
        return sweep.spread(found, "+.3f", of_mean=True) if any(found) else ""

    columns = [
        sweep.Column("teachers", "name"),
        sweep.Column("held-out loss", lambda row: sweep.spread(row["losses"], ".3f")),
        sweep.Column("difference", apart),
        *(
            sweep.Column(languages, functools.partial(part, number=number), ".3f")
            for number, languages in enumerate(GROUPS)
        ),
        sweep.Column("weights", "weights", ".2f"),
        sweep.Column("bytes a step, sent and received", "bytes", ",.0f"),
    ]
    of_teacher, of_student = record["steps"]
    taught = ", ".join(report.figure(each, ".3f") for each in record["teachers"])
    return report.join(
        report.heading(record, report.seeds(record)),
        f"{of_student} steps of a student. The loss is that on held-out text, nats a"
        " masked piece: mean of the languages and, with the standard deviation, of the"
        " seeds. Differences are paired by seed, with their standard error. The"
        f" teachers' own, after {of_teacher} steps, on their languages: {taught}.",
        sweep.table(columns, record["rows"], "lllrrll"),
    )


SWEEP = sweep.Sweep(
    "teachers",
    record,
    markdown,
    figures=figures,
    scales=list(STEPS),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
