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
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import shared_flags
from nebula_jax.communication import codec
from nebula_jax.communication.wire import frames
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from scripts.bench import harness, labs
from scripts.bench import report as bench_report
from scripts.tables import config
from scripts.tables import runs as table_runs

flags.DEFINE_string(
    "bench_end", "", "Set for the processes of the benchmark itself, as JSON."
)

LINES = {"60": "60mbit,15ms", "170": "170mbit,15ms"}  # Mbit/s -> line
ROUNDS, STEPS, WARM_UP = 3, 150, 5  # so many steps that handshakes take little CPU time
KILOBYTES = {"60": 256, "170": 724}  # the size of a tensor: some 35 ms on its line
COMPUTE_SECONDS = 0.08


def end(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Exchanges tensors with the other process; returns the seconds of each step."""
    reach = connect.Settings(**settings["reach"])
    size = settings["kilobytes"] * 1000
    spec = jax.ShapeDtypeStruct((size,), np.uint8)
    array = jax.device_put(np.arange(size, dtype=np.uint8))
    seconds, hello = [], frames.Hello(settings["cluster"], "bench", {})
    with contextlib.ExitStack() as stack:
        is_listener, names = settings["cluster"] == "target", ["target", "source"]
        peers = stack.enter_context(all_clusters.connected(reach, hello, names))
        (link,) = peers.links.values()
        out = link.sender("tensor", spec, codec.identity())
        back = link.receiver("tensor", spec, codec.identity())
        if is_listener:
            link.welcome(0)
        else:
            link.wait_for_welcome(labs.SECONDS)
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
    commands = [
        labs.trainer({"reach": reach, "cluster": cluster, "kilobytes": kilobytes})
        for cluster, reach in reaches.items()
    ]
    target, source = harness.together(commands, labs.SECONDS)
    return {
        "step": statistics.median(target["seconds"]),
        "cpu": target["cpu"] + source["cpu"],
        "wall": target["wall"],
    }


def measure_line(mbit: str, both: tuple[labs.Lab, labs.Lab]) -> dict[str, Any]:
    """Measures the exchange with and without switches, in turn."""
    s, t = both
    common = {"wan": LINES[mbit], "connect_timeout": 60.0}
    federated_ends = {
        "target": {**common, "federation": str(t.folder), "job": "bench"},
        "source": {**common, "federation": str(s.folder), "job": "bench"},
    }
    rounds = []
    for _ in range(ROUNDS):
        where = f"127.0.0.1:{harness.free_port()}"
        plain_ends = {
            "target": {**common, "listen": where},
            "source": {**common, "peer": where},
        }
        plain = exchange(plain_ends, KILOBYTES[mbit])
        before = s.cpu_seconds(), t.cpu_seconds()
        federated = exchange(federated_ends, KILOBYTES[mbit])
        switches = s.cpu_seconds() - before[0], t.cpu_seconds() - before[1]
        more = (federated["cpu"] - plain["cpu"]) / 2  # of one trainer
        rounds.append(
            {
                "plain": plain["step"],
                "federated": federated["step"],
                "switch_cores": max(switches) / federated["wall"],
                "trainer_cores": more / federated["wall"],
                "ratio": federated["step"] / plain["step"],
            }
        )
    return {
        "mbit": mbit,
        "kilobytes": KILOBYTES[mbit],
        **{
            name: statistics.median(each[name] for each in rounds) for name in rounds[0]
        },
    }


def gather(folder: pathlib.Path) -> dict[str, Any]:
    """Measures everything."""
    began = time.monotonic()
    with labs.two_labs(folder / "two") as both:
        secure = time.monotonic() - began
        rows = [measure_line(mbit, both) for mbit in LINES]
    seconds = labs.revocations(folder / "three")
    return {
        "rounds": ROUNDS,
        "install_to_secure_seconds": secure,
        "rows": rows,
        "revocation_seconds": sorted(seconds),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    rows = [
        each
        | {name: 1000 * each[name] for name in ("plain", "federated")}
        | {"more": each["ratio"] - 1}
        for each in result["rows"]
    ]
    columns = {
        "line": "{mbit} Mbit/s, {kilobytes} kB each way",
        "plain TCP, ms a step": "{plain:.1f}",
        "over switches, ms": "{federated:.1f}",
        "more": "{more:+.1%}",
        "a switch, of a core": "{switch_cores:.1%}",
        "a trainer, of a core": "{trainer_cores:+.1%}",
    }
    return report.join(
        report.heading(result, f"{result['rounds']} rounds", " of measuring"),
        bench_report.table_of(rows, columns),
        f"From an empty folder to a line between two labs, with all commands:"
        f" {result['install_to_secure_seconds']:.1f} s. A lab that is revoked at one"
        f" lab is gone from another, over a line of {labs.FLOOD_MBIT} Mbit/s"
        f" that is full both ways, after {_at(result, 0.5):.2f} s (median),"
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
        process.sigterm_as_exit(),
        run_folder.lock(table.workdir),
        tempfile.TemporaryDirectory() as folder,
    ):
        found = gather(pathlib.Path(folder))
    result = report.provenance(time.monotonic() - began) | found
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "workdir"])
