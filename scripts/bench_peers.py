"""Gives several frameworks the same local steps over the same line, beside each other.

    python -m scripts.bench_peers --environments=peers --make    # environments, once
    python -m scripts.bench_peers --environments=peers --out=bench_peers.json

Two workers, each in a network namespace and on a core of its own, train one model: the
same parameters at step 0, the same batches, the same number of inner steps between two
rounds. The kernel shapes the line between them. A framework without its environment is
left out, and the record says so. Then a worker is killed, whatever ends is started
again, and the clock stops when the next round has ended. Needs Linux, root, ip and tc.

    a round     seconds between the ends of two rounds, median
    computing   seconds of it in inner steps
    bytes       what leaves both sites in a round, all headers and heartbeats included
    loss        on held-out text, in nats, after the last round: equal numbers of tokens
    memory      peak of a worker and its children, MB
"""

import itertools
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import flags

from experiments import shared_flags
from nebula_jax import errors, installed
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.bench import harness
from scripts.peers import sites as sites_lib
from scripts.peers import trials

flags.DEFINE_string(
    "environments", "runs/peers", "Folder with an environment for each of the others."
)
flags.DEFINE_bool("make", False, "Makes the environments that are missing, and ends.")
flags.DEFINE_list("only", [], "Arms to run; all if empty.")
flags.DEFINE_list("sizes", [], "Models to train, such as 1 M; all if empty.")
flags.DEFINE_list("lines", [], "Lines to use, such as 60 Mbit/s; all if empty.")

KILL_AFTER = 3  # rounds
KILLED = ("1 M", "60 Mbit/s")  # where a worker is killed, after a row's run


ARMS = {
    "Nebula mesh float32": trials.Arm("with_nebula", variant="mesh float32"),
    "Nebula hub float32": trials.Arm("with_nebula", variant="hub float32"),
    "Nebula mesh e3m0": trials.Arm("with_nebula", variant="mesh e3m0"),
    "Nebula streaming e3m0": trials.Arm("with_nebula", variant="streaming e3m0"),
    "torchft DiLoCo": trials.Arm("with_torchft", "torch", has_server=True),
    "accelerate LocalSGD": trials.Arm("with_accelerate", "torch", goes_on=False),
    "hivemind fp16": trials.Arm("with_hivemind", "hivemind"),
    "Flower FedAvg": trials.Arm("with_flower", "flower", "", True, True),
}


SIZES = {"1 M": trials.Size(600, 10, 50, 64), "22 M": trials.Size(4150, 6, 20, 32)}
LINES = {"60 Mbit/s": 60.0, "170 Mbit/s": 170.0, "none": None}


def python_of(arm: trials.Arm) -> pathlib.Path | None:
    """Returns the interpreter of an arm's environment; None if there is none."""
    if not arm.environment:
        return pathlib.Path(sys.executable)
    folder = pathlib.Path(flags.FLAGS["environments"].value).absolute()
    found = folder / arm.environment / "bin" / "python"
    return found if found.exists() else None


def make_environments() -> None:
    """Installs each framework into an environment of its own, by Python 3.11."""
    folder = pathlib.Path(flags.FLAGS["environments"].value)
    python = shutil.which("python3.11") or sys.executable
    for name in sorted({arm.environment for arm in ARMS.values()} - {""}):
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
    times = [each["at"] for each in trial.rounds()]
    at, sent = zip(*trial.samples, strict=True)
    bytes_then = np.interp([times[0], times[-1]], at, sent)
    computed = [each["computed"] for each in trial.events(0) if "round" in each]
    return {
        "round": statistics.median(np.diff(times)),
        "computing": statistics.median(computed[1:]),  # the first one compiles
        "bytes": float(np.diff(bytes_then)[0]) / (len(times) - 1),
        "loss": statistics.mean(trial.losses()),
        "memory": trial.peak_mb,
    }


def recovery(trial: trials.Trial) -> float:
    """Returns the seconds from a kill of the second worker to the end of a round."""
    while len(trial.rounds()) < KILL_AFTER:
        trial.watch()
    last, moment = trial.rounds()[-1]["round"], time.time()
    trial.kill(1)
    while trial.rounds()[-1]["round"] <= last:
        trial.watch()
    return trial.rounds()[-1]["at"] - moment


def rows() -> Iterator[dict[str, Any]]:
    """Measures arm after arm, for each size and line."""
    chosen, sizes, lines = (
        flags.FLAGS[name].value or list(every)
        for name, every in (("only", ARMS), ("sizes", SIZES), ("lines", LINES))
    )
    for size, line in itertools.product(sizes, lines):
        for name in chosen:
            row = {"model": size, "line": line, "arm": name}
            try:
                row |= _row(ARMS[name], size, line)
            except errors.NebulaError as error:  # the others go on
                row["reason"] = str(error)
            process.message(json.dumps(row))
            yield row


def _row(arm: trials.Arm, size: str, line: str) -> dict[str, float]:
    python = python_of(arm)
    if python is None:
        raise errors.NebulaError(f"there is no environment {arm.environment}")
    with trials.running(arm, python, SIZES[size], LINES[line]) as trial:
        found = measured(trial)
    if (size, line) == KILLED and arm.goes_on:
        endless = SIZES[size]._replace(rounds=10_000)
        with trials.running(arm, python, endless, LINES[line]) as trial:
            found["recovery"] = recovery(trial)
    return found


COLUMNS = {
    "a round": "{round:.2f} s",
    "computing": "{computing:.2f} s",
    "bytes": "{bytes:,.0f}",
    "loss": "{loss:.4f}",
    "memory": "{memory:,.0f} MB",
    "after a kill": "{recovery:.1f} s",
}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record: a table for each model and line, shortest round first."""
    parts = [
        report.heading(record, "Python of peers 3.11"),
        "Two workers, a core each. The line is the kernel's: no delay is added to it.",
    ]
    keys = dict.fromkeys((each["model"], each["line"]) for each in record["rows"])
    for model, line in keys:
        found = [
            each
            for each in record["rows"]
            if (each["model"], each["line"]) == (model, line)
        ]
        found.sort(key=lambda each: each.get("round", float("inf")))
        size = SIZES[model]
        cells = [
            [each["arm"], *(_cell(each, form) for form in COLUMNS.values())]
            for each in found
        ]
        parts += [
            f"{model} parameters, {size.inner_steps} steps a round, {size.rounds}"
            f" rounds, {size.batch} examples a step and worker; line: {line}.",
            report.table(["", *COLUMNS], cells),
            *(
                f"{each['arm']}: {each['reason']}."
                for each in found
                if "reason" in each
            ),
        ]
    return report.join(*parts)


def _cell(row: Mapping[str, Any], form: str) -> str:
    try:
        return form.format(**row)
    except KeyError:
        return "–"


@process.sigterm_as_exit()
def main() -> int:
    """Measures, prints the tables, and writes --out."""
    if flags.FLAGS["make"].value:
        make_environments()
        return 0
    sites_lib.check()
    begin = time.monotonic()
    harness.finish({"rows": list(rows())}, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(
        main, names=["out", "environments", "make", "only", "sizes", "lines"]
    )
