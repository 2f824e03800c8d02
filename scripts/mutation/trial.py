"""Trials of mutants: each is a forked process that runs tests until one fails.

    python -m scripts.mutation.trial TRIALS.json FOLDER WORKERS

prints a line of JSON as each one ends; FOLDER gets what the tests print. What all need
is imported once, before the fork, so a trial costs little more than its tests. Nothing
of the project is imported there, and JAX has no backend yet.
"""

import contextlib
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
POLL_SECONDS = 0.02


class Outcome(enum.Enum):
    """The end of a trial."""

    KILLED = 1
    """A test failed."""
    SURVIVED = 0
    """All tests passed."""
    BROKEN = 90
    """The module cannot be imported: no mutant for a test to notice."""
    HUNG = 91
    """The tests did not end in time. A mutant that hangs is noticed."""


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that has another source for one module."""

    def __init__(self, module: str, origin: str, source: str) -> None:
        self._module, self._origin, self._source = module, origin, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=self._origin)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._origin
        exec(compile(self._source, self._origin, "exec"), module.__dict__)


class Trial(NamedTuple):
    """A process to try."""

    module: str
    """Module with a change; empty to run the tests on the project as it is."""
    source: str
    """The text of the changed module."""
    tests: Sequence[str]
    """Files or folders, relative to the project's folder."""
    limit: float
    """Seconds."""


def run(trial: Trial, log: pathlib.Path) -> int:
    """Runs a trial in this process; returns the value of its Outcome.

    Args:
      trial: to run.
      log: file that gets what the tests print.
    """
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if trial.module:
        origin = str(ROOT / (trial.module.replace(".", "/") + ".py"))
        sys.meta_path.insert(0, _Mutated(trial.module, origin, trial.source))
        try:
            importlib.import_module(trial.module)
        except Exception:
            return Outcome.BROKEN.value
    import pytest

    os.chdir(ROOT)
    options = "--strict-markers -m 'not slow' --import-mode=importlib"
    status = pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "-o", f"addopts={options}", *trial.tests]
    )
    return Outcome.KILLED.value if status else Outcome.SURVIVED.value


class Result(NamedTuple):
    """The end of one trial."""

    number: int
    """The trial's, from 0."""
    outcome: Outcome
    seconds: float


def run_all(
    trials: Iterable[Trial], folder: pathlib.Path, workers: int
) -> Iterator[Result]:
    """Runs trials, several at a time; yields results as they come.

    Args:
      trials: to run.
      folder: for what tests print: a file for each worker.
      workers: processes at a time.
    """
    waiting, running = enumerate(trials), {}
    free = list(range(workers))
    while True:
        while free and (upcoming := next(waiting, None)) is not None:
            number, trial = upcoming
            worker = free.pop()
            pid = _fork(trial, folder / f"worker{worker}.log")
            running[pid] = (number, worker, time.monotonic(), trial.limit)
        if not running:
            return
        for pid, (number, worker, start, limit) in list(running.items()):
            seconds = time.monotonic() - start
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and seconds < limit:
                continue
            outcome = Outcome.HUNG
            if ended:
                code = os.waitstatus_to_exitcode(status)
                known = [each.value for each in Outcome]
                # A test may bring the process down: that is noticed too.
                outcome = Outcome(code) if code in known else Outcome.KILLED
            _end(pid, has_ended=bool(ended))
            del running[pid]
            free.append(worker)
            yield Result(number, outcome, seconds)
        time.sleep(POLL_SECONDS)


def _fork(trial: Trial, log: pathlib.Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = Outcome.BROKEN.value
    try:
        os.setsid()  # what the tests start can be ended with them
        status = run(trial, log)
    finally:
        os._exit(status)


def _end(pid: int, has_ended: bool) -> None:
    """Ends what a trial has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not has_ended:
        os.waitpid(pid, 0)


def import_once() -> None:
    """Imports what tests import beside the project, with their settings."""
    spec = importlib.util.spec_from_file_location(
        "settings", ROOT / "tests/conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # sets variables
    for name in (
        *("jax", "jax.numpy", "flax.linen", "flax.struct", "optax", "numpy"),
        *("hypothesis.strategies", "pytest", "cryptography.x509", "zstandard"),
        *("orbax.checkpoint", "scipy", "absl.flags"),
    ):
        importlib.import_module(name)


def main() -> None:
    """Runs the trials of a file."""
    _, given, folder, workers = sys.argv
    trials = [Trial(*each) for each in json.loads(pathlib.Path(given).read_text())]
    import_once()
    for result in run_all(trials, pathlib.Path(folder), int(workers)):
        print(
            json.dumps([result.number, result.outcome.name, result.seconds]), flush=True
        )


if __name__ == "__main__":
    main()
