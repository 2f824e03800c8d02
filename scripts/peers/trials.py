"""A framework at work on the task: its processes, what they log, send and take."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from nebula_jax import errors
from scripts.peers import sites as sites_lib
from scripts.peers import task as task_lib

LONGEST_SECONDS = 300.0  # of a trial
POLL_SECONDS = 0.25
RESTART_SECONDS = 1.0  # from the end of a worker until it is started again


class Arm(NamedTuple):
    """A framework in one of its modes."""

    module: str
    environment: str = ""  # empty for this one
    package: str = "nebula_jax"  # the framework's, for its version
    variant: str = ""
    has_server: bool = False  # True if another process at the first site has a part
    averages_at_server: bool = False  # True if the server says when a round has ended
    goes_on: bool = True  # True if a job goes on after the death of a worker
    is_for_kills: bool = False  # True if only what follows a death is its own


class Trial:
    """An arm at work: its processes and what they have logged."""

    def __init__(
        self,
        arm: Arm,
        python: pathlib.Path,
        task: task_lib.Task,
        sites: Sequence[sites_lib.Site],
    ) -> None:
        """Starts all processes, of tasks that differ from `task` by their worker."""
        self._arm, self._task, self._sites = arm, task, sites
        self._command = [str(python), "-m", "scripts.peers"]
        self._processes: dict[int, psutil.Popen] = {}
        self._ended: dict[int, float] = {}  # number -> when
        self._is_killed, self._begin, self.peak_mb = False, time.monotonic(), 0.0
        for number in [task_lib.SERVER] * arm.has_server + [0, 1]:
            self._start(number)

    def _start(self, number: int) -> None:
        site, folder = self._sites[number % 2], pathlib.Path(self._task.folder)
        task = dataclasses.replace(
            self._task, worker=number, host=site.address, device=site.device
        )
        with (folder / f"output{number}.txt").open("a") as output:
            self._processes[number] = psutil.Popen(
                site.command([*self._command, str(task.write())]),
                cwd=folder,
                env=sites_lib.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def events(self, worker: int) -> list[dict[str, Any]]:
        """Returns what a worker has logged so far."""
        path = pathlib.Path(self._task.folder, f"worker{worker}.jsonl")
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def rounds(self) -> list[dict[str, Any]]:
        """Returns the ends of rounds so far."""
        clock = task_lib.SERVER if self._arm.averages_at_server else 0
        return [each for each in self.events(clock) if "round" in each]

    def losses(self) -> list[float | None]:
        """Returns the losses of those that are done; None where one has none."""
        every = itertools.chain(*(self.events(number) for number in range(3)))
        return [each["loss"] for each in every if "loss" in each]

    def is_done(self) -> bool:
        """Returns True when all have said how they ended."""
        return len(self.losses()) == (1 if self._arm.averages_at_server else 2)

    def watch(self) -> None:
        """Waits a little, measures, and starts again what has failed.

        Raises errors.NebulaError if one fails that nobody killed, or all take too long.
        """
        time.sleep(POLL_SECONDS)
        for site in self._sites:
            used = sum(_resident(each) for each in site.processes()) / 2**20
            self.peak_mb = max(self.peak_mb, used)
        for number in list(self._processes):
            if self._processes[number].poll() is not None:
                self._revive(number)
        if time.monotonic() - self._begin > LONGEST_SECONDS:
            last = "; ".join(self._last_words(number) for number in self._processes)
            raise errors.NebulaError(f"not done after {LONGEST_SECONDS:g} s: {last}")

    def _revive(self, number: int) -> None:
        """Starts again who was killed; who has ended otherwise has said its loss."""
        if self._is_killed:
            ended = self._ended.setdefault(number, time.monotonic())
            if time.monotonic() > ended + RESTART_SECONDS:
                del self._ended[number]
                self._start(number)
        elif not any("loss" in each for each in self.events(number)):
            words = self._last_words(number)
            raise errors.NebulaError(f"worker {number} ended: {words}")

    def _last_words(self, number: int) -> str:
        text = pathlib.Path(self._task.folder, f"output{number}.txt").read_text()
        return " ".join(text.strip().splitlines()[-1:])

    def kill(self, number: int) -> None:
        """Ends a worker as a crash does, with all at its site: helpers outlive it."""
        self._is_killed = True
        for each in self._sites[number].processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def stop(self) -> None:
        """Ends all."""
        self.kill(0)
        self.kill(1)
        psutil.wait_procs(self._processes.values(), timeout=10)


def _resident(each: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return each.memory_info().rss
    return 0


@contextlib.contextmanager
def running(
    arm: Arm, python: pathlib.Path, size: task_lib.Size, megabits: float | None
) -> Iterator[Trial]:
    """Yields an arm at work in a new folder and sites, `joined` by so many Mbit/s."""
    with tempfile.TemporaryDirectory(prefix="peers") as folder:
        np.save(pathlib.Path(folder, "text.npy"), text())
        with sites_lib.joined(megabits) as sites:
            task = task_lib.Task(
                **dataclasses.asdict(size),
                folder=folder,
                root=sites[0].address,
                module=arm.module,
                variant=arm.variant,
            )
            trial = Trial(arm, python, task, sites)
            try:
                yield trial
            finally:
                trial.stop()


def text() -> np.ndarray:
    """Returns Python's own library, as bytes below 128."""
    paths = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    found = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    return found[found < task_lib.SYMBOLS]
