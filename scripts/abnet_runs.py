"""Runs of train_abnet for a table: each is done once, and what it left is kept.

A table takes hours, so every run's figures are written as soon as it has ended, to a
small file of its own; the same command goes on with the runs that are missing.
"""

import hashlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import clusters, lifecycle
from nebula_jax import errors
from nebula_jax.training import metrics

SCALE = flags.DEFINE_enum("scale", "tiny", ["tiny"], "How large the runs are.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Of the runs that BLEU is the mean of.")

FOLDER = pathlib.Path(__file__).parents[1] / "experiments"
LOG_LINES = 12  # of a failed run, in the error


class Run(NamedTuple):
    """One run of an experiment."""

    name: str
    """Also of its files: `quality-int8-seed0`."""
    arguments: tuple[str, ...]
    """After `python -m experiments.train_abnet`, but for --workdir."""
    model: str = ""
    """Runs that say the same need the same PLM-T: it is prepared once."""


Execute = Callable[[Run, pathlib.Path], None]


class Runs:
    """The runs of a table, in a folder of theirs."""

    def __init__(self, folder: pathlib.Path, execute: Execute | None = None):
        """Takes what is there.

        Args:
          folder: `results/` has the figures of finished runs, `run/` the one under way.
          execute: starts a run and waits for its end; the real command if not given.
        """
        self.folder = folder
        self._execute = execute or start
        self._commit = clusters.commit()
        self._other_commits: set[str] = set()

    def path(self, name: str) -> pathlib.Path:
        """Where a run's figures are, once it has ended."""
        return self.folder / "results" / f"{name}.json"

    def found(self, run: Run) -> dict[str, Any] | None:
        """The figures of a run that has ended, else None.

        Raises:
          errors.NebulaError: if they are of other flags.
        """
        path = self.path(run.name)
        if not path.is_file():
            return None
        result = json.loads(path.read_text())
        if result["arguments"] != list(run.arguments) or result["flagfiles"] != (
            digest(run.arguments)
        ):
            raise errors.NebulaError(
                f"{path} was run with other flags ({' '.join(result['arguments'])});"
                " remove it, or name another --workdir"
            )
        commit = result["summary"]["commit"]
        if commit != self._commit and commit not in self._other_commits:
            self._other_commits.add(commit)
            lifecycle.say(f"{path} is of commit {commit}; now it is {self._commit}")
        return result

    def result(self, run: Run) -> dict[str, Any]:
        """The figures of a run, which is done now unless it has been.

        Returns:
          summary: what the run's report says. losses: [[step, loss]] of the cluster
          that has the translation loss. records: of the source cluster, if there is
          one, else of the same: metrics.jsonl without its losses.
        """
        found = self.found(run)
        if found is not None:
            return found
        workdir = self.folder / "run"
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True)
        shared = self.folder / "models" / run.model
        own = workdir / "target" / "model"
        if run.model and shared.is_dir():
            shutil.copytree(shared, own)
        lifecycle.say(f"{run.name}: {' '.join(run.arguments)}")
        with lifecycle.timed(run.name):
            self._execute(run, workdir)
        if run.model and own.is_dir() and not shared.is_dir():
            shutil.copytree(own, shared)
        result = {
            "arguments": list(run.arguments),
            "flagfiles": digest(run.arguments),
            **figures(workdir),
        }
        path = self.path(run.name)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result) + "\n")
        partial.replace(path)
        shutil.rmtree(workdir)
        return result


def start(run: Run, workdir: pathlib.Path) -> None:
    """Runs the real command to its end.

    Raises:
      errors.NebulaError: if it failed, with the last it said.
    """
    command = [
        *(sys.executable, "-m", "experiments.train_abnet"),
        *run.arguments,
        f"--workdir={workdir}",
    ]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent.resolve() / "compiled")}
    log = workdir / "log.txt"
    with log.open("w") as stream:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=cache | os.environ,
        ).returncode
    if status:
        said = "\n  ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise errors.NebulaError(
            f"{run.name} ended with status {status}; {log} ends with\n  {said}"
        )


def figures(workdir: pathlib.Path) -> dict[str, Any]:
    """What a table needs of a finished run."""
    summary = json.loads((workdir / "summary.json").read_text())
    names = [each["cluster"] for each in summary["clusters"]]
    translating = metrics.read(workdir / ("target" if "target" in names else names[0]))
    told = metrics.read(workdir / ("source" if "source" in names else names[0]))
    steps = [record for record in told if "loss" in record]
    return {
        "summary": {name: of for name, of in summary.items() if name != "examples"},
        "losses": [
            [each["step"], each["loss"]] for each in translating if "loss" in each
        ],
        "records": [
            {name: each[name] for name in RECORDED if name in each} for each in steps
        ],
    }


RECORDED = ("step", "time", "bytes_sent", "bytes_received", "waiting_share")


def digest(arguments: Sequence[str]) -> str:
    """Of the flagfiles among arguments, without comments."""
    hashed = hashlib.sha256()
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag == "--flagfile":
            hashed.update(json.dumps(settings(pathlib.Path(value))).encode())
    return hashed.hexdigest()[:16]


def settings(flagfile: pathlib.Path) -> dict[str, str]:
    """Flag -> value of a flagfile; `true` where it has none."""
    lines = [line.strip() for line in flagfile.read_text().splitlines()]
    parts = [
        line.removeprefix("--").partition("=") for line in lines if line[:2] == "--"
    ]
    return {flag: value if equals else "true" for flag, equals, value in parts}


def flagfile(name: str) -> pathlib.Path:
    """A flagfile of this repository, as a person would name it from here."""
    return pathlib.Path(os.path.relpath(FOLDER / "flags" / f"{name}.flags"))


def base_arguments(flagfile: pathlib.Path) -> tuple[str, ...]:
    """What all runs of a table are given."""
    return (
        f"--flagfile={flagfile}",
        f"--data_dir={clusters.DATA_DIR.value}",
        f"--pretrained_dir={clusters.PRETRAINED_DIR.value}",
        f"--prepared_dir={clusters.PREPARED_DIR.value}",
    )


def bleu(result: dict[str, Any], split: str = "test") -> float:
    """The last BLEU on a split."""
    scores = [each[split] for each in result["summary"]["bleu"] if split in each]
    return scores[-1]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample); 0 for a single value."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) if len(values) > 1 else 0.0
