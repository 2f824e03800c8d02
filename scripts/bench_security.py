"""Measures what a federation costs: the step of a run over two switches, or without.

    python -m scripts.bench_security

Two processes exchange a tensor each way a step, over an emulated line, by plain TCP
and over two switches with all of it on: TLS between the switches, sealed frames between
the trainers, policy, quotas and audit log. Rounds of both take turns; a step computes
for as long as the line takes, as in a run that is worth its line. Also the
seconds from nothing to the first secure line, and how soon a lab is gone that was
revoked at another lab, while the line between the two others is full.
"""

import contextlib
import json
import math
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import psutil
from absl import flags

from experiments import shared_flags
from nebula_jax.communication import codec, endpoints
from nebula_jax.communication.wire import frames
from nebula_jax.runtime import addresses, connect, report, run_folder
from nebula_jax.security import (
    account_token,
    authority,
    federation,
    identity,
    invitations,
    revocation,
)
from nebula_jax.security.switch import inner, joining
from scripts.bench import relay
from scripts.tables import config
from scripts.tables import runs as table_runs

flags.DEFINE_string(
    "bench_end", "", "Set for the processes of the benchmark itself, as JSON."
)
for _name in ("out", "workdir"):
    flags.declare_key_flag(_name)

LINES = {"60": "60mbit,15ms", "170": "170mbit,15ms"}
"""Mbit/s -> line."""
ROUNDS, STEPS, WARM_UP = 3, 150, 5
"""So many steps that the CPU time of the handshakes is a small part."""
KILOBYTES = {"60": 256, "170": 724}
"""The size of a tensor: some 35 ms on its line."""
COMPUTE_SECONDS = 0.08
REVOCATIONS = 100
FLOOD_MBIT, FLOOD_KILOBYTES = 60, 1000
SECONDS = 120


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


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def two_labs(folder: pathlib.Path) -> Iterator[tuple[Lab, Lab]]:
    """Yields two labs from nothing, connected."""
    s, t = Lab(folder / "s"), Lab(folder / "t")
    where = f"127.0.0.1:{free_port()}"
    try:
        s.nebula("init", "--name", "lab-s")
        s.start("--listen", where)
        invitation = s.nebula("invite", "lab-t", "--address", where)
        t.nebula("join", where, "--name", "lab-t", given=invitation)
        t.start("--peer", where)
        deadline = time.monotonic() + SECONDS
        while "line to lab-t" not in s.nebula("status"):
            if time.monotonic() > deadline:
                raise RuntimeError("the labs have not connected")
        yield s, t
    finally:
        s.stop()
        t.stop()


# One end of the exchange, a process of its own.


def end(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Exchanges tensors with the other end; returns the seconds of each step."""
    reach = connect.Settings(**settings["reach"])
    size = settings["kilobytes"] * 1000
    spec = jax.ShapeDtypeStruct((size,), np.uint8)
    array = jax.device_put(np.arange(size, dtype=np.uint8))
    seconds, hello = [], frames.Hello(settings["cluster"], "bench", {})
    with contextlib.ExitStack() as stack:
        is_listener = settings["cluster"] == "target"
        if is_listener:
            (link,) = stack.enter_context(connect.listen(reach, hello, ["source"]))
        else:
            link = stack.enter_context(connect.dial(reach, hello, peer="target"))
        out = link.sender("tensor", spec, codec.identity())
        back = link.receiver("tensor", spec, codec.identity())
        if is_listener:
            link.welcome(0)
        else:
            link.wait_for_welcome(SECONDS)
        before = resource.getrusage(resource.RUSAGE_SELF)
        for step in range(1, settings.get("steps", STEPS) + 1):
            began = time.monotonic()
            out.send(step, array)
            time.sleep(settings.get("compute", COMPUTE_SECONDS))
            back.recv(step)
            seconds.append(time.monotonic() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime"))
    return {"seconds": seconds[WARM_UP:], "cpu": cpu, "wall": sum(seconds)}


def exchange(
    reaches: Mapping[str, Mapping[str, Any]], kilobytes: int
) -> dict[str, Any]:
    """Runs both ends; returns the median step, and both ends' share of a core."""
    started = []
    for cluster in ("target", "source"):
        settings = {"reach": reaches[cluster], "cluster": cluster}
        given = json.dumps(settings | {"kilobytes": kilobytes})
        command = [sys.executable, "-m", "scripts.bench_security"]
        started.append(
            subprocess.Popen(
                [*command, f"--bench_end={given}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = []
    for each in started:
        output, errors = each.communicate(timeout=SECONDS)
        if each.returncode:
            raise RuntimeError(errors)
        ends.append(json.loads(output.splitlines()[-1]))
    return {
        "step": statistics.median(ends[0]["seconds"]),
        "cpu": sum(each["cpu"] for each in ends),
        "wall": ends[0]["wall"],
    }


def measure_line(mbit: str, labs: tuple[Lab, Lab]) -> dict[str, Any]:
    """Measures the exchange with and without switches, in turn."""
    s, t = labs
    common = {"wan": LINES[mbit], "connect_timeout": 60.0}
    rounds = []
    for _ in range(ROUNDS):
        where = f"127.0.0.1:{free_port()}"
        plain = exchange(
            {
                "target": {**common, "listen": where},
                "source": {**common, "peer": where},
            },
            KILOBYTES[mbit],
        )
        before = s.cpu_seconds(), t.cpu_seconds()
        federated = exchange(
            {
                "target": {**common, "federation": str(t.folder), "job": "bench"},
                "source": {**common, "federation": str(s.folder), "job": "bench"},
            },
            KILOBYTES[mbit],
        )
        switches = s.cpu_seconds() - before[0], t.cpu_seconds() - before[1]
        rounds.append(
            {
                "plain": plain["step"],
                "federated": federated["step"],
                "switch_cores": max(switches) / federated["wall"],
                "trainer_cores": (federated["cpu"] - plain["cpu"])
                / 2
                / federated["wall"],
            }
        )
    return {
        "mbit": mbit,
        "kilobytes": KILOBYTES[mbit],
        **{
            name: statistics.median(each[name] for each in rounds)
            for name in ("plain", "federated", "switch_cores", "trainer_cores")
        },
        "ratio": statistics.median(
            each["federated"] / each["plain"] for each in rounds
        ),
    }


# A revocation, while the line is full.


def _join(issuer: authority.LocalAuthority, path: pathlib.Path, where: str) -> None:
    """Makes the folder of lab-t, invited anew."""
    folder = federation.Folder(path / "federation")
    text = issuer.invite("lab-t", where)
    joining.join(folder, invitations.parse(text))
    identity.Identity.begin(folder.path, "bench", time.time()).close()


def _has_line(lab: Lab, other: str) -> bool:
    token = account_token.read(federation.Folder(lab.folder), "")
    folder = federation.Folder(lab.folder)
    sock, answer = inner.request(folder, 10.0, "status", account=token)
    sock.close()
    return any(each["lab"] == other for each in answer["lines"])


@contextlib.contextmanager
def flood(source: Lab, target: Lab) -> Iterator[None]:
    """Lets trainers of two labs send as much as their line takes, both ways."""
    started = []
    for cluster, lab in (("target", target), ("source", source)):
        reach = {"federation": str(lab.folder), "job": "flood"}
        more = {"kilobytes": FLOOD_KILOBYTES, "steps": 10**9, "compute": 0.0}
        given = json.dumps({"reach": reach, "cluster": cluster} | more)
        command = [sys.executable, "-m", "scripts.bench_security"]
        started.append(subprocess.Popen([*command, f"--bench_end={given}"]))
    try:
        time.sleep(5.0)  # they have met
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def measure_revocations(folder: pathlib.Path) -> list[float]:
    """Revokes lab-t at lab-s; returns the seconds until lab-u is rid of it, each time.

    All that lab-u learns comes over its line to lab-s, which is full.
    """
    found = []
    s, u = Lab(folder / "s"), Lab(folder / "u")
    where, outside = (f"127.0.0.1:{free_port()}" for _ in range(2))
    s.nebula("init", "--name", "lab-s")
    s.start("--listen", where)
    slow = relay.Relay(addresses.host_and_port("peer", where), FLOOD_MBIT * 1e6 / 8)
    try:
        invitation = s.nebula("invite", "lab-u", "--address", where)
        u.nebula("join", where, "--name", "lab-u", given=invitation)
        u.start("--listen", outside, "--peer", endpoints.written(slow.address))
        issuer = authority.LocalAuthority(federation.Folder(s.folder))
        revoked = revocation.RevocationList(federation.Folder(s.folder))
        with flood(s, u):
            for number in range(REVOCATIONS):
                t = Lab(folder / f"t{number}")
                try:
                    _join(issuer, t.path, where)
                    t.start("--peer", outside)
                    while not _has_line(u, "lab-t"):
                        time.sleep(0.05)
                    issuer.revoke("lab-t")
                    began = time.monotonic()
                    revoked.accept(issuer.revocation_list())
                    while _has_line(u, "lab-t"):
                        time.sleep(0.01)
                    found.append(time.monotonic() - began)
                finally:
                    t.stop()
    finally:
        u.stop()
        slow.close()
        s.stop()
    return found


def gather(folder: pathlib.Path) -> dict[str, Any]:
    """Measures everything."""
    began = time.monotonic()
    with two_labs(folder / "two") as labs:
        secure = time.monotonic() - began
        rows = [measure_line(mbit, labs) for mbit in LINES]
    revocations = measure_revocations(folder / "three")
    return {
        "rounds": ROUNDS,
        "install_to_secure_seconds": secure,
        "rows": rows,
        "revocation_seconds": sorted(revocations),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    rows = [
        [
            f"{each['mbit']} Mbit/s, {each['kilobytes']} kB each way",
            f"{1000 * each['plain']:.1f}",
            f"{1000 * each['federated']:.1f}",
            f"{each['ratio'] - 1:+.1%}",
            f"{each['switch_cores']:.1%}",
            f"{each['trainer_cores']:+.1%}",
        ]
        for each in result["rows"]
    ]
    header = [
        *("line", "plain TCP, ms a step", "over switches, ms", "more"),
        *("a switch, of a core", "a trainer, of a core"),
    ]
    return report.join(
        report.heading(result, f"{result['rounds']} rounds", " of measuring"),
        report.table(header, rows, "lrrrrr"),
        f"From an empty folder to a line between two labs, with all commands:"
        f" {result['install_to_secure_seconds']:.1f} s. A lab that is revoked at one"
        f" lab is gone from another, over a line of {FLOOD_MBIT} Mbit/s that is full"
        f" both ways, after {_at(result, 0.5):.2f} s (median),"
        f" {_at(result, 0.99):.2f} s (99 of 100), of"
        f" {len(result['revocation_seconds'])} revocations.",
    )


def _at(result: Mapping[str, Any], share: float) -> float:
    """Returns the seconds within which a share of the revocations took effect."""
    seconds = result["revocation_seconds"]
    return float(seconds[math.ceil(share * len(seconds)) - 1])


def main() -> int:
    """Measures; writes and prints the record."""
    if flags.FLAGS.bench_end:
        print(json.dumps(end(json.loads(flags.FLAGS.bench_end))))
        return 0
    table = config.from_flags("bench_security", needs_text=False)
    began = time.monotonic()
    with (
        run_folder.lock(table.workdir),
        tempfile.TemporaryDirectory() as folder,
    ):
        found = gather(pathlib.Path(folder))
    result = report.provenance(time.monotonic() - began) | found
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
