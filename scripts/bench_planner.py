"""Holds the planner to its word: predicted against measured seconds of a step.

    python -m scripts.bench_planner

Two traced runs, one of each scenario, give the compute of every part on this machine.
From that, the flags, and nothing else the planner predicts the step of other runs:
other lines, codecs, windows, micro-batches, and clusters of two processes. Each of them
is then done. (A core that idles between two steps computes the next one more slowly
here. So each is fitted as it mostly runs: M3, whose clusters overlap, without a pause,
and ABNet, whose clusters wait for each other, over a line.) Runs are done once; after a
stop, the same command goes on. All clusters share this machine's cores, so nothing else
should run on it.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from experiments import shared_flags
from nebula_jax.commands import command_line
from nebula_jax.parallel import planner
from nebula_jax.runtime.records import progress, report, run_folder
from nebula_jax.training import metrics
from scripts.plans import abnet as abnet_plan
from scripts.plans import m3 as m3_plan
from scripts.plans import settings as plan_settings
from scripts.tables import config
from scripts.tables import runs as table_runs

WITHIN = 0.15
"""The share of the measured time by which a prediction may be off."""
WARM_UP = 20  # steps
ROOMS = {"m3": m3_plan, "abnet": abnet_plan}
MODULES = {"m3": "experiments.pretrain_m3", "abnet": "experiments.train_abnet"}
SIDES = {
    "m3": {"generators": "generator-0", "discriminator": "discriminator"},
    "abnet": {"source": "source", "target": "target"},
}
"""Scenario -> side of a plan -> folder of the run."""
COMMON = {
    "m3": f"--flagfile={table_runs.flagfile('m3_two_clusters')}"
    " --steps=120 --eval_every=120 --checkpoint_every=120",
    "abnet": f"--flagfile={table_runs.flagfile('abnet_quickstart')}"
    " --steps=60 --eval_every=60 --checkpoint_every=60 --mlm_head_steps=0"
    " --length_buckets=32 --bleu_sentences=1 --adapter_dropout=0"
    " --forward_codec=identity --backward_codec=identity"
    " --batch_size=16 --micro_batches=1 --max_in_flight=1",
}
LINE = "--wan=60mbit,15ms"
FOUR = (
    "--batch_size=64 --micro_batches=4 --max_in_flight=4 --steps=35 --eval_every=35"
    " --checkpoint_every=35"
)
INT4 = "--forward_codec=hadamard|int4(32) --backward_codec=hadamard|int4(32)"


class Case(NamedTuple):
    """A run that is predicted, or from which it is."""

    experiment: str
    """m3 or abnet."""
    what: str
    """A person's description."""
    flags: str = ""
    """Beside COMMON, with spaces between them; later ones hold."""
    processes: int = 1
    """In each cluster."""

    @property
    def arguments(self) -> list[str]:
        """The flags of the run."""
        return f"{COMMON[self.experiment]} {self.flags}".split()


FITTED = {
    "m3": Case("m3", "taking turns, no line", "--window=0"),
    "abnet": Case("abnet", "one micro-batch, 60 Mbit/s", LINE),
}
FP16 = f"{FOUR} --wan=10mbit,15ms --forward_codec=fp16 --backward_codec=int8(tensor)"
PREDICTED = (
    Case("m3", "taking turns, 60 Mbit/s", f"--window=0 {LINE}"),
    Case("m3", "taking turns, 0.1 Mbit/s", "--window=0 --wan=100kbit,15ms"),
    Case("m3", "window 2, 60 Mbit/s", LINE),
    Case("m3", "window 2, 0.05 Mbit/s", "--wan=50kbit,15ms"),
    Case("m3", "fan-out 3, 60 Mbit/s", f"--fan_out=3 {LINE}"),
    Case("m3", "taking turns, 2 processes", f"--window=0 {LINE}", 2),
    Case("abnet", "one micro-batch, no line"),
    Case("abnet", "one micro-batch, 10 Mbit/s", "--wan=10mbit,15ms"),
    Case("abnet", "four micro-batches, 60 Mbit/s", f"{FOUR} {LINE}"),
    Case("abnet", "four, fp16 and int8, 10 Mbit/s", FP16),
    Case("abnet", "one, int4 both ways, 2 Mbit/s", f"--wan=2mbit,15ms {INT4}"),
    Case("abnet", "one micro-batch, 2 processes", LINE, 2),
)

Fit = Mapping[str, planner.Compute]
"""Side -> its compute, alone on the machine."""


def run_of(case: Case, table: config.Table, is_traced: bool) -> table_runs.Run:
    """Describes the run of a case."""
    name = f"{case.experiment}-{case.what}".replace(" ", "-").replace("/", "")
    more = [f"--processes_per_cluster={case.processes}"] * (case.processes > 1)
    return table_runs.Run(
        name.replace(",", ""),
        MODULES[case.experiment],
        (
            *case.arguments,
            *more,
            f"--prepared_dir={table.prepared_dir}",
            f"--pretrained_dir={table.pretrained_dir}",
            "--log_every=5",
            f"--{'' if is_traced else 'no'}trace",
        ),
    )


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the time of a step, and of a traced run the compute of its parts."""
    sides = next(sides for name, sides in SIDES.items() if MODULES[name] == run.module)
    leader = workdir / list(sides.values())[-1]
    records = [each for each in metrics.read(leader) if "loss" in each]
    timed = [each for each in records if each["step"] >= WARM_UP]
    seconds = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(timed)
    ]
    return {
        "summary": {**report.read_summary(workdir), "examples": []},
        "step_seconds": statistics.median(seconds),
        "parts": {
            side: _parts(workdir / folder)
            for side, folder in sides.items()
            if (workdir / folder / "trace.json").is_file()
        },
    }


def _parts(folder: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of a cluster's compute in a step of one micro-batch.

    Args:
      folder: of a traced cluster.

    Returns:
      `first` and `second`, what the trace has of a micro-batch, with what sending and
      receiving take this side; `update`, the rest; and the `cores` kept busy.
    """
    summary = report.read_summary(folder)
    steps = summary["last_step"] - summary["first_step"]  # the first one is left out
    time = summary["time"]
    each = {name: seconds / steps for name, seconds in time["parts"].items()}
    line = sum(each.get(name, 0.0) for name in ("encode", "send", "receive", "decode"))
    rest = sum(each.get(name, 0.0) for name in ("compute", "next batch", "record"))
    first, second = _micro_batch(folder / "trace.json")
    if not first:  # M3's are not marked: a step is a micro-batch, all of it
        first, rest = rest, rest
    busy = time["seconds"] - time["parts"]["wait"] - time["parts"][progress.FIRST_STEP]
    return {
        "first": first + line,
        "second": second,
        "update": max(0.0, rest - first - second),
        "cores": max(1.0, time["cpu_seconds"] / busy),
    }


def _micro_batch(path: pathlib.Path) -> tuple[float, float]:
    """Returns the medians of a micro-batch's first and second compute; 0 for none."""
    events = json.loads(path.read_text())["traceEvents"]
    found: dict[int, list[float]] = collections.defaultdict(list)
    for each in sorted(events, key=lambda each: each.get("ts", 0.0)):
        if each["name"] == "compute" and "micro_batch" in each["args"]:
            found[each["args"]["step"]].append(each["dur"] / 1e6)
    steps = [found[step] for step in found if step >= WARM_UP]
    return tuple(  # type: ignore[return-value]
        statistics.median([each[number] for each in steps if len(each) > number] or [0])
        for number in range(2)
    )


def fit(parts: Mapping[str, Mapping[str, float]]) -> Fit:
    """Returns the compute of a scenario's sides.

    Args:
      parts: side -> figures of the run whose clusters take turns.
    """
    names = ("first", "second", "update", "cores")
    return {
        side: planner.Compute(*(each[name] for name in names))
        for side, each in parts.items()
    }


def predict(case: Case, fitted: Fit) -> float:
    """Returns the planner's seconds of a step.

    Args:
      case: to predict.
      fitted: of its scenario.
    """
    own = [f"--experiment={case.experiment}", "--workdir=unused"]
    flags.FLAGS.unparse_flags()
    command_line.parse([sys.argv[0], *case.arguments, *own])
    given = plan_settings.from_flags()
    compute = dict(fitted)
    if case.processes > 1:  # each has its share of the rows, and as many cores
        compute = {
            side: dataclasses.replace(
                each.scaled(1 / case.processes), cores=each.cores * case.processes
            )
            for side, each in compute.items()
        }
    run = ROOMS[case.experiment].pace(given, compute, given.lines)
    return planner.time_of(run, _cores(fitted)).seconds


def _cores(fitted: Fit) -> float:
    """Returns the cores that one process alone got at most: more there are not.

    Cores that share their units, as most virtual ones do, are fewer than they are
    counted.
    """
    return min(os.cpu_count() or 1, max(each.cores for each in fitted.values()))


def gather(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Gathers the record; does the runs that have not been done."""
    begun = {
        name: runs.result(run_of(case, table, True)) for name, case in FITTED.items()
    }
    fits = {name: fit(each["parts"]) for name, each in begun.items()}
    done = {case: runs.result(run_of(case, table, False)) for case in PREDICTED}
    return {
        "fitted": {name: each["parts"] for name, each in begun.items()},
        "rows": [
            {
                "experiment": case.experiment,
                "what": case.what,
                "measured": each["step_seconds"],
                "predicted": predict(case, fits[case.experiment]),
                "is_fitted": case in FITTED.values(),
            }
            for case, each in (
                *((case, begun[name]) for name, case in FITTED.items()),
                *done.items(),
            )
        ],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    rows, held = [], []
    for row in result["rows"]:
        off = row["predicted"] / row["measured"] - 1
        if not row["is_fitted"]:
            held.append(abs(off) <= WITHIN)
        rows.append(
            [
                row["experiment"],
                row["what"],
                f"{1000 * row['measured']:.0f}",
                f"{1000 * row['predicted']:.0f}",
                "fitted" if row["is_fitted"] else f"{off:+.0%}",
            ]
        )
    header = ["scenario", "run", "measured, ms", "predicted, ms", "off by"]
    return report.join(
        report.heading(result, "seed 0", " of runs"),
        report.table(header, rows, "llrrr"),
        f"{sum(held)} of {len(held)} predictions are within {WITHIN:.0%} of what was"
        " measured.",
    )


def main() -> int:
    """Does the missing runs; writes and prints the report."""
    table = config.from_flags("bench_planner", needs_text=False)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, figures, results=table.results)
        found = gather(runs, table)
    about = runs.provenance()
    result = about | found
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    # Those of a plan are set for each case, not by the command.
    shared_flags.run(main, names=["workdir", "out", "prepared_dir", "pretrained_dir"])
