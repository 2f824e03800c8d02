"""What the benchmarks share: rounds, their figures, targets, commands, the record."""

import contextlib
import json
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE
from typing import Any, NamedTuple

import jax
from absl import flags

from nebula_jax import errors, installed
from nebula_jax.runtime.records import report

flags.DEFINE_integer(
    "rounds", 5, "Rounds that a figure is the median of.", lower_bound=1
)

ROOT = installed.FOLDER


def time_runs(
    runs: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Times every run in every round, after one round that does not count.

    A run returns what it computes. Returns name -> seconds, one for each round.
    """
    seconds = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Returns the median of the rounds' ratios, since a round shares its noise."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, the smallest and the largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def finish(
    result: Mapping[str, Any],
    begin: float,
    markdown: Callable[[Mapping[str, Any]], str],
) -> None:
    """Prints the record, and writes it to --out; `begin` is from `time.monotonic`."""
    record = report.provenance(time.monotonic() - begin) | result
    report.show(markdown(record))
    if flags.FLAGS["out"].value:
        report.write(pathlib.Path(flags.FLAGS["out"].value), record)


def together(commands: Sequence[Sequence[str]], seconds: float) -> list[dict[str, Any]]:
    """Runs commands that need each other; returns the JSON lines that they print.

    None of them outlives the call; raises errors.NebulaError if one fails.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=PIPE, text=True
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [each.communicate(timeout=seconds)[0] for each in started]
        if any(each.returncode for each in started):
            raise errors.NebulaError("a process failed; see its own error above")
    lines = "".join(outputs).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


_HELD: list[socket.socket] = []


def free_port() -> int:
    """Returns a port for a process that is yet to start, and nobody else's meanwhile.

    It stays bound here: with SO_REUSEADDR, as our listeners have it, Linux lets one
    that names the port listen there, and gives it to none that leaves the choice to it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


class Sample(NamedTuple):
    """A line of progress: when it came, in seconds since 1970, and its step."""

    at: float
    step: int


class Command:
    """A command of ours as a child process, and its discriminator's progress."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.samples: list[Sample] = []
        self.last_line = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # it is a pipe
        for line in self.process.stdout:
            self.last_line = line.strip()
            if found := re.match(r"discriminator\s+step\s+(\d+)", line):
                self.samples.append(Sample(time.time(), int(found[1])))

    def is_running(self) -> bool:
        """Returns True if the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Ends the process as a crash of its machine does."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)  # seconds; its children may hold the pipe open
