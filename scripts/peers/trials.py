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

SERVER = 2  # the number of the process that a framework's server is
LONGEST_SECONDS = 900.0  # of a trial
POLL_SECONDS = 0.1
RESTART_SECONDS = 1.0  # from the end of a worker until it is started again


class Arm(NamedTuple):
    """A framework in one of its modes."""

    module: str
    environment: str = ""
    """Empty for this one."""
    variant: str = ""
    has_server: bool = False
    """True if another process at the first site has a part."""
    averages_at_server: bool = False
    """True if the server says when a round has ended."""
    goes_on: bool = True
    """True if a job goes on after the death of a worker."""


class Size(NamedTuple):
    """A model and its schedule."""

    width: int
    rounds: int
    inner_steps: int
    batch: int


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
        self._module = [str(python), "-m", f"scripts.peers.{arm.module}"]
        self._processes: dict[int, psutil.Popen] = {}
        self._ended: dict[int, float] = {}  # number -> when
        self._is_killed = False
        self.peak_mb, self.samples = 0.0, [(time.time(), 0)]
        task.write()
        for number in [SERVER] * arm.has_server + [0, 1]:
            self._start(number)

    def _start(self, number: int) -> None:
        site = self._sites[number % 2]
        task = dataclasses.replace(
            self._task, worker=number, host=site.address, device=site.device
        )
        folder = pathlib.Path(task.folder)
        with (folder / f"output{number}.txt").open("a") as output:
            self._processes[number] = psutil.Popen(
                site.command([*self._module, json.dumps(dataclasses.asdict(task))]),
                cwd=folder,
                env=sites_lib.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _family(self, number: int) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [*self._processes[number].children(True), self._processes[number]]
        return []

    def events(self, worker: int) -> list[dict[str, Any]]:
        """Returns what a worker has logged so far."""
        path = pathlib.Path(self._task.folder, f"worker{worker}.jsonl")
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def rounds(self) -> list[dict[str, Any]]:
        """Returns the ends of rounds so far."""
        clock = SERVER if self._arm.averages_at_server else 0
        return [each for each in self.events(clock) if "round" in each]

    def losses(self) -> list[float]:
        """Returns the held-out losses of those that are done."""
        every = itertools.chain(*(self.events(number) for number in range(3)))
        return [each["loss"] for each in every if "loss" in each]

    def is_done(self) -> bool:
        """Returns True when all have said how they ended."""
        return len(self.losses()) == (1 if self._arm.averages_at_server else 2)

    def watch(self) -> None:
        """Waits a little, measures, and starts again what has failed.

        Raises:
          errors.NebulaError: if one fails that nobody has killed, or all take too long.
        """
        time.sleep(POLL_SECONDS)
        sent = [_sent(each.pid, site) for each, site in self._both()]
        if None not in sent:
            self.samples.append((time.time(), sum(sent)))
        for number in (0, 1):
            used = sum(_resident(each) for each in self._family(number)) / 2**20
            self.peak_mb = max(self.peak_mb, used)
        for number in list(self._processes):
            self._revive(number)
        if time.time() - self.samples[0][0] > LONGEST_SECONDS:
            raise errors.NebulaError(f"not done after {LONGEST_SECONDS:g} s")

    def _both(self) -> Iterator[tuple[psutil.Popen, sites_lib.Site]]:
        return ((self._processes[number], self._sites[number]) for number in (0, 1))

    def _revive(self, number: int) -> None:
        status = self._processes[number].poll()
        if status in (None, 0):
            return
        if not self._is_killed:
            text = pathlib.Path(self._task.folder, f"output{number}.txt").read_text()
            last = text.strip().splitlines()[-1:]
            raise errors.NebulaError(f"worker {number} ended: {' '.join(last)}")
        ended = self._ended.setdefault(number, time.time())
        if time.time() > ended + RESTART_SECONDS:
            del self._ended[number]
            self._start(number)

    def kill(self, number: int) -> None:
        """Ends a worker as a crash of its machine does; it is started again."""
        self._is_killed = True
        for each in self._family(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def stop(self) -> None:
        """Ends all."""
        for number in self._processes:
            self.kill(number)
        psutil.wait_procs(self._processes.values(), timeout=10)


def _sent(pid: int, site: sites_lib.Site) -> int | None:
    """Returns the bytes that have left the namespace of a process."""
    with contextlib.suppress(OSError):  # it has just ended
        for line in pathlib.Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.strip().partition(":")
            if name == site.device:
                return int(numbers.split()[8])
    return None


def _resident(each: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return each.memory_info().rss
    return 0


@contextlib.contextmanager
def running(
    arm: Arm, python: pathlib.Path, size: Size, megabits: float | None
) -> Iterator[Trial]:
    """Yields an arm at work in new sites and a new folder; all ends with the block.

    Args:
      python: the interpreter of its environment.
      megabits: of the line each way, Mbit/s; None for a line that nothing slows.
    """
    with tempfile.TemporaryDirectory(prefix="peers") as folder:
        np.save(pathlib.Path(folder, "text.npy"), text())
        with sites_lib.joined(megabits) as sites:
            task = task_lib.Task(
                worker=0,
                folder=folder,
                host="",
                device="",
                root=sites[0].address,
                variant=arm.variant,
                **size._asdict(),
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
