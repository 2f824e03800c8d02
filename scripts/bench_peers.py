"""Gives several frameworks the same work over the same line, beside each other.

    python -m scripts.bench_peers --environments=peers --make    # environments, once
    python -m scripts.bench_peers --environments=peers

*Local steps*: two workers, each in a network namespace and on a core of its own, train
one model: the same parameters at step 0, the same batches, the same number of inner
steps between two rounds. *The cut*: each has a part of an encoder-decoder of the shape
of Table 5's; a step is a round. The kernel shapes the line between them. A framework
without its environment is left out, and the record says so. Then a worker is killed,
whatever ends is started again, and the clock stops when the next round has ended. Rows
are measured one after the other; after a stop, the same command goes on. Needs Linux,
root, ip, tc and setpriv.

    a round     seconds between the ends of two rounds, median
    computing   seconds of it in gradients
    bytes       what crosses in a round, both ways, headers and heartbeats included
    loss        on held-out text, in nats, after the last round: equal numbers of
                tokens; at the cut the mean of the last five steps, on the same batches
    memory      peak of all processes of a site, MB
"""

import dataclasses
import functools
import itertools
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import shared_flags
from nebula_jax import errors, installed
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.peers import cut_with_nebula, translator, trials
from scripts.peers import sites as sites_lib
from scripts.peers import task as task_lib
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

flags.DEFINE_string(
    "environments", "runs/peers", "Folder with an environment for each of the others."
)
flags.DEFINE_bool("make", False, "Makes the environments that are missing, and ends.")
flags.DEFINE_list("only", [], "Arms to run; all if empty.")
flags.DEFINE_list("sizes", [], "Models to train, such as 1 M; all if empty.")
flags.DEFINE_list("lines", [], "Lines to use, such as 60 Mbit/s; all if empty.")

KILL_AFTER = 2  # rounds
LEAST_BYTES = 3e5  # of a round; fewer are heartbeats
KILLED = ("1 M", "60 Mbit/s")  # where a worker is killed, after a row's run

Arm = trials.Arm
LOCAL_STEPS = {  # name -> arm; each table's first is what the others are compared with
    "Nebula mesh float32": Arm("with_nebula", variant="mesh float32"),
    "Nebula hub float32": Arm("with_nebula", variant="hub float32"),
    "Nebula hub quorum": Arm("with_nebula", variant="hub quorum", is_for_kills=True),
    "Nebula mesh e3m0": Arm("with_nebula", variant="mesh e3m0"),
    "Nebula streaming e3m0": Arm("with_nebula", variant="streaming e3m0"),
    "torchft DiLoCo": Arm("with_torchft", "torch", "torchft", has_server=True),
    "accelerate LocalSGD": Arm("with_accelerate", "torch", "accelerate", goes_on=False),
    "hivemind fp16": Arm("with_hivemind", "hivemind", "hivemind"),
    "Flower FedAvg": Arm(
        "with_flower", "flower", "flwr", has_server=True, averages_at_server=True
    ),
}
CUT = {
    **{
        f"Nebula {name}": Arm("cut_with_nebula", variant=name)
        for name in cut_with_nebula.CODECS
    },
    "torch pipelining float32": Arm("cut_with_torch", "torch", "torch"),
}
SIZES = {
    "1 M": task_lib.Size(width=600, rounds=5, inner_steps=50, batch=64),
    "22 M": task_lib.Size(width=4150, rounds=3, inner_steps=10, batch=32),
    "the cut": task_lib.Size(
        width=translator.WIDTH, rounds=12, inner_steps=1, batch=128, rate=5e-4
    ),
}
LINES = {"60 Mbit/s": 60.0, "170 Mbit/s": 170.0, "none": None}


def arms_of(size: str) -> dict[str, Arm]:
    """Returns name -> arm, of those that train a model."""
    return CUT if size == "the cut" else LOCAL_STEPS


def python_of(arm: Arm) -> pathlib.Path:
    """Returns the interpreter of an arm's environment; NebulaError if there is none."""
    if not arm.environment:
        return pathlib.Path(sys.executable)
    folder = pathlib.Path(flags.FLAGS["environments"].value).absolute()
    found = folder / arm.environment / "bin" / "python"
    if not found.exists():
        raise errors.NebulaError(f"there is no environment {arm.environment}")
    return found


def make_environments() -> None:
    """Installs each framework into an environment of its own, by Python 3.11."""
    folder = pathlib.Path(flags.FLAGS["environments"].value)
    python = shutil.which("python3.11") or sys.executable
    for name in sorted(
        {arm.environment for arm in (LOCAL_STEPS | CUT).values()} - {""}
    ):
        if (folder / name).exists():
            continue
        subprocess.run([python, "-m", "venv", folder / name], check=True)
        wanted = installed.FOLDER / f"requirements-peers-{name}.txt"
        pip = [folder / name / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", wanted], check=True)


def measured(trial: trials.Trial) -> dict[str, float]:
    """Waits for the end, and returns the figures of a row."""
    while not trial.is_done():
        trial.watch()
    rounds = trial.rounds()
    computed = [each["computed"] for each in trial.events(0) if "round" in each]
    if len(computed) < len(rounds):
        raise errors.NebulaError("the first worker did not train in every round")
    found = {
        "round": statistics.median(np.diff([each["at"] for each in rounds])),
        "computing": statistics.median(computed[1:]),  # the first one compiles
        "bytes": (rounds[-1]["bytes"] - rounds[0]["bytes"]) / (len(rounds) - 1),
        "loss": statistics.mean(filter(None, trial.losses())),
        "memory": trial.peak_mb,
    }
    # At the cut computing and sending are one call.
    return {name: float(value) for name, value in found.items() if value}


def recovery(trial: trials.Trial) -> float:
    """Returns the seconds from a kill of the second worker to the end of a round."""
    while len(trial.rounds()) < KILL_AFTER:
        trial.watch()
    last, moment = trial.rounds()[-1]["round"], time.time()
    trial.kill(1)
    while trial.rounds()[-1]["round"] <= last:
        trial.watch()
    return trial.rounds()[-1]["at"] - moment


def run_of(size: str, line: str, arm: str) -> table_runs.Run:
    """Describes the run that measures a row."""
    name = re.sub(r"\W+", "_", f"{size} {line} {arm}")
    row = f"--sizes={size}", f"--lines={line}", f"--only={arm}"
    return table_runs.Run(name, "scripts.bench_peers", (*row, str(SIZES[size])))


def execute(run: table_runs.Run, workdir: pathlib.Path) -> None:
    """Measures a row in `workdir`; NebulaError if its framework is absent or fails."""
    size, line, name = (each.partition("=")[2] for each in run.arguments[:3])
    begin, arm = time.monotonic(), arms_of(size)[name]
    start = functools.partial(trials.running, arm, python_of(arm))
    with process.sigterm_as_exit():
        with start(SIZES[size], LINES[line]) as trial:
            found: dict[str, Any] = measured(trial)
        if found["bytes"] < LEAST_BYTES:
            raise errors.NebulaError("the workers have trained each for itself")
        if (size, line) == KILLED and arm.goes_on:
            endless = dataclasses.replace(SIZES[size], rounds=10_000, saves=True)
            try:
                with start(endless, LINES[line]) as trial:
                    found["recovery"] = recovery(trial)
            except errors.NebulaError as error:
                found["reason"] = f"after a kill, {error}"
    if arm.environment:
        read = f"metadata.version({arm.package!r}), 'on Python', sys.version.split()[0]"
        code = f"import sys; from importlib import metadata; print({read})"
        printed = subprocess.check_output([python_of(arm), "-c", code], text=True)
        found["version"] = f"{arm.package} {printed.strip()}"
    row = {"model": size, "line": line, "arm": name, **found}
    about = report.provenance(time.monotonic() - begin)
    report.write(workdir / "summary.json", about | {"row": row})


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; measures the rows that are missing."""
    del table
    rows: list[Mapping[str, Any]] = []
    for each in _chosen():
        try:
            rows.append(runs.result(run_of(*each))["summary"]["row"])
        except errors.NebulaError as error:  # the others go on
            row = dict(zip(("model", "line", "arm"), each, strict=True))
            rows.append(row | {"reason": str(error)})
    return {
        "sizes": {name: dataclasses.asdict(size) for name, size in SIZES.items()},
        "rows": rows,
    }


def _chosen() -> Iterator[tuple[str, str, str]]:
    """Yields size, line and arm of the rows that the flags name."""
    only, sizes, lines = (
        flags.FLAGS[name].value for name in ("only", "sizes", "lines")
    )
    for size, line in itertools.product(sizes or SIZES, lines or LINES):
        for arm, about in arms_of(size).items():
            is_told = not about.is_for_kills or (size, line) == KILLED
            if is_told and arm in (only or [arm]):
                yield size, line, arm


FIGURES = {  # figure of a row -> its column and form; less of it is better
    "round": ("a round", "{:.2f} s"),
    "computing": ("computing", "{:.2f} s"),
    "bytes": ("bytes", "{:,.0f}"),
    "loss": ("loss", "{:.4f}"),
    "memory": ("memory", "{:,.0f} MB"),
    "recovery": ("after a kill", "{:.1f} s"),
}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record: a table for each model and line, shortest round first."""
    rows = record["rows"]
    parts = [
        report.heading(record, report.seeds(record), " of runs"),
        "Two workers, a core each. The line is the kernel's: no delay is added to it."
        " *×*: over the same figure of Nebula's first arm, of float32.",
    ]
    for model, line in dict.fromkeys((each["model"], each["line"]) for each in rows):
        found = [row for row in rows if (row["model"], row["line"]) == (model, line)]
        found.sort(key=lambda row: row.get("round", float("inf")))
        size = task_lib.Size(**record["sizes"][model])
        parts += [
            f"**{model}; line: {line}.** {_ahead(found)} Rounds: {size.rounds}, steps"
            f" of each: {size.inner_steps}, examples of a step: {size.batch}.",
            sweep.table(_columns(found, next(iter(arms_of(model)))), found),
            *(f"{row['arm']}: {row['reason']}." for row in found if "reason" in row),
        ]
    versions = sorted({row["version"] for row in rows if "version" in row})
    return report.join(*parts, f"Others: {'; '.join(versions) or 'none'}.")


def _columns(rows: Sequence[Mapping[str, Any]], first: str) -> list[sweep.Column]:
    """Returns the columns of a table: of figures that were taken, and of ratios."""
    columns = [sweep.Column("", "arm")]
    for name, (title, form) in FIGURES.items():
        if any(name in row for row in rows):
            columns.append(sweep.Column(title, _figure(name, form)))
    base = {row["arm"]: row for row in rows}.get(first, {})
    for name in sorted({"round", "bytes"} & base.keys(), reverse=True):
        title, over = FIGURES[name][0], base[name]
        columns.append(sweep.Column(f"{title}, ×", _figure(name, "{:.2f}", over)))
    return columns


def _figure(name: str, form: str, over: float = 1.0) -> Callable[[Any], str]:
    """Returns what renders a figure of a row; a dash where the arm has none."""
    return lambda row: form.format(row[name] / over) if name in row else report.NOTHING


def _ahead(rows: Sequence[Mapping[str, Any]]) -> str:
    """Names who is better than all of Nebula's arms, in what, and how many times."""
    ours = [row for row in rows if row["arm"].startswith("Nebula")]
    found = []
    for row in rows:
        for name, (title, _) in FIGURES.items():
            best = min((each[name] for each in ours if name in each), default=0.0)
            if row.get(name, best) < best:
                found.append(f"{row['arm']}, {title} {row[name] / best:.3f}")
    if not found:
        return "Nobody is ahead of Nebula's."
    return f"Ahead of the best of Nebula's, times its figure: {'; '.join(found)}."


SWEEP = sweep.Sweep(
    "bench_peers", record, markdown, execute=execute, seeds=1, needs_text=False
)


def main() -> int:
    """Makes the environments, or measures what is missing and writes the record."""
    if flags.FLAGS["make"].value:
        make_environments()
        return 0
    sites_lib.check()
    return SWEEP.run()


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "workdir", "results_dir"])
