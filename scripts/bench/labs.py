"""Labs of a federation on this machine, for a benchmark."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from scripts.bench import harness

SECONDS = 120  # for a command, or until two labs have connected


class Lab:
    """A lab in a folder, and its switch as a process."""

    def __init__(self, path: pathlib.Path) -> None:
        """Makes the folder; `nebula` is run in it."""
        path.mkdir(parents=True)
        self.path, self.folder = path, path / "federation"
        self.switch: subprocess.Popen | None = None

    def nebula(self, *arguments: str, given: str = "") -> str:
        """Runs a command of `nebula`; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "scripts.nebula", *arguments],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            input=given,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    def start(self, *arguments: str) -> None:
        """Starts the switch, and waits until it runs."""
        self.switch = subprocess.Popen(
            [sys.executable, "-m", "scripts.nebula", "switch", *arguments],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.switch.stdout is not None
        self.switch.stdout.readline()

    def cpu_seconds(self) -> float:
        """Returns the seconds that the switch has computed."""
        assert self.switch is not None
        times = psutil.Process(self.switch.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Ends the switch."""
        if self.switch is not None:
            self.switch.terminate()
            self.switch.communicate(timeout=SECONDS)


@contextlib.contextmanager
def lab_in(path: pathlib.Path) -> Iterator[Lab]:
    """Yields a lab in a new folder, whose switch ends with the block."""
    lab = Lab(path)
    try:
        yield lab
    finally:
        lab.stop()


@contextlib.contextmanager
def two_labs(folder: pathlib.Path) -> Iterator[tuple[Lab, Lab]]:
    """Yields two labs from nothing, connected."""
    where = f"127.0.0.1:{harness.free_port()}"
    with lab_in(folder / "s") as s, lab_in(folder / "t") as t:
        s.nebula("init", "--name", "lab-s")
        s.start("--listen", where)
        invitation = s.nebula("invite", "lab-t", "--address", where)
        t.nebula("join", where, "--name", "lab-t", given=invitation)
        t.start("--peer", f"lab-s={where}")
        deadline = time.monotonic() + SECONDS
        while "line to lab-t" not in s.nebula("status"):
            if time.monotonic() > deadline:
                raise RuntimeError("the labs have not connected")
        yield s, t


def trainer(given: Mapping[str, Any]) -> list[str]:
    """Returns the command of an end of an exchange.

    Args:
      given: its settings, as in `bench_security.end`.
    """
    module, end = "scripts.bench_security", f"--bench_end={json.dumps(given)}"
    return [sys.executable, "-m", module, end]
