"""Labs of a federation on this machine, and how soon one that is revoked is gone."""

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

from nebula_jax.communication import endpoints
from nebula_jax.federation import inner
from nebula_jax.security.membership import authority, revocation, site_folder
from scripts.bench import harness, relay

SECONDS = 120  # for a command, or until two labs have connected
REVOCATIONS = 100
FLOOD_MBIT, FLOOD_KILOBYTES = 60, 1000
FULL_BYTES = 20e6  # that have crossed when trainers have met


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
    """Returns the command of an end with these settings, as in `bench_security.end`."""
    module, end = "scripts.bench_security", f"--bench_end={json.dumps(given)}"
    return [sys.executable, "-m", module, end]


def _sent(lab: Lab) -> dict[str, int]:
    """Returns the bytes that a lab's switch has sent on each of its lines."""
    found = inner.ask(site_folder.Folder(lab.folder), 10.0, "status")
    return dict(found["sent"])


@contextlib.contextmanager
def flood(source: Lab, target: Lab) -> Iterator[None]:
    """Lets trainers of two labs send as much as their line takes, both ways."""
    more = {"kilobytes": FLOOD_KILOBYTES, "steps": 10**9, "compute": 0.0}
    with contextlib.ExitStack() as stack:
        for cluster, lab, peer in (
            ("target", target, "lab-s"),
            ("source", source, "lab-u"),
        ):
            reach = {"federation": str(lab.folder), "job": "flood", "peer": peer}
            given = {"reach": reach, "cluster": cluster} | more
            stack.enter_context(process := subprocess.Popen(trainer(given)))
            stack.callback(process.kill)
        deadline = time.monotonic() + SECONDS
        while not any(each > FULL_BYTES for each in _sent(source).values()):
            if time.monotonic() > deadline:
                raise RuntimeError("the trainers have not filled the line")
            time.sleep(0.1)
        yield


def revocations(folder: pathlib.Path) -> list[float]:
    """Revokes lab-t at lab-s; returns seconds till lab-u drops it, over a full line."""
    found = []
    where, outside = (f"127.0.0.1:{harness.free_port()}" for _ in range(2))
    line = relay.Relay(endpoints.host_and_port("peer", where), FLOOD_MBIT * 1e6 / 8)
    with (
        lab_in(folder / "s") as s,
        contextlib.closing(line),
        lab_in(folder / "u") as u,
    ):
        s.nebula("init", "--name", "lab-s")
        s.start("--listen", where)
        invitation = s.nebula("invite", "lab-u", "--address", where)
        u.nebula("join", where, "--name", "lab-u", given=invitation)
        relayed = f"lab-s={endpoints.written(line.address)}"
        u.start("--listen", outside, "--peer", relayed)
        issuer = authority.LocalAuthority(site_folder.Folder(s.folder))
        revoked = revocation.RevocationList(site_folder.Folder(s.folder))
        with flood(s, u):
            for number in range(REVOCATIONS):
                with lab_in(folder / f"t{number}") as t:
                    invitation = issuer.invite("lab-t", where)
                    t.nebula("join", where, "--name", "lab-t", given=invitation)
                    t.start("--peer", f"lab-u={outside}")
                    while "lab-t" not in _sent(u):
                        time.sleep(0.05)
                    issuer.revoke("lab-t")
                    began = time.monotonic()
                    revoked.accept(issuer.revocation_list()[1])
                    while "lab-t" in _sent(u):
                        time.sleep(0.01)
                    found.append(time.monotonic() - began)
    return found
