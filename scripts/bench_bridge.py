"""Measures the bridge beside plain sockets.

    python -m scripts.bench_bridge

In every round each transport has its turn, two processes of its own, so that other work
on the machine slows all alike. Figures are medians of the rounds, and ratios medians of
the rounds' ratios.

    throughput   tensors of 25,165,824 bytes (25 MB: a micro-batch of the paper's hidden
                 states in fp32, 64 x 128 x 768) and of an eighth of that (3 MB), sent
                 one after the other with one answer at the end
    CPU          seconds per GB, of sender plus receiver, all their threads
    round trip   64 bytes in both directions, with each end on its own core, as on two
                 machines; and with both on one core, where no core has to be woken

Messages end in the receiver's memory.
"""

import collections
import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

from experiments import shared_flags
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from nebula_jax.security.tls import certificates
from scripts.bench import harness, worker
from scripts.bench import report as bench_report
from scripts.bench.transports import OWNERS, TRANSPORTS

LONGEST_SECONDS = 600.0  # for the measurements of one transport, on a busy machine
SIZES = {"25 MB": 25_165_824, "3 MB": 3_145_728}  # bytes
SENT_BYTES = 300e6  # per measurement
ROUND_TRIPS = 2000
CPU_TARGET = 1.25  # times the reference's, at most
ROUND_TRIP_TARGET = 2.0  # times the reference's, at most

Plan = Mapping[str, Mapping[str, Any]]
"""Name of a measurement -> its entry of `worker.MEASUREMENTS`, `do`, and arguments."""
Records = dict[str, dict[str, list[dict[str, float]]]]  # name -> measure -> rounds


def run(name: str, plan: Plan, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Measures with one transport, by two processes.

    Args:
      name: of the transport.
      plan: the measurements; in their order.
      folder: with credentials of both ends.

    Returns:
      Side -> measurement -> what the worker found; `connect` sends.
    """
    transport, commands = TRANSPORTS[name], []
    common = {
        "transport": name,
        "port": harness.free_port(),
        "sizes": [*SIZES.values(), worker.SMALL],
        "plan": plan,
    }
    for side, owner in OWNERS.items():
        credentials = folder / owner.replace(":", "-") if transport.tls else ""
        request = common | {"side": side, "credentials": str(credentials)}
        module = [sys.executable, "-m", "scripts.bench.worker"]
        commands.append([*module, json.dumps(request)])
    found = harness.together(commands, LONGEST_SECONDS)
    return {each["side"]: each["found"] for each in found}


def run_rounds(plan: Plan, rounds: int) -> Records:
    """Takes the measures of every transport, round by round, turn by turn."""
    names = list(TRANSPORTS)
    records: Records = {name: collections.defaultdict(list) for name in names}
    with credentials() as folder:
        for number in range(rounds):
            process.message(f"round {number + 1} of {rounds}")
            for name in names:
                found = run(name, plan, folder)
                for what, given in plan.items():
                    ends = [found[side][what] for side in ("connect", "listen")]
                    figures = FIGURES[given["do"]](given, *ends)
                    records[name][what].append(figures)
            names.reverse()  # so that none is always the first
    return records


@contextlib.contextmanager
def credentials() -> Iterator[pathlib.Path]:
    """Yields a folder with the credentials of both ends."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        certificates.issue_for_run(pathlib.Path(folder), OWNERS.values())
        yield pathlib.Path(folder)


def _throughput(
    given: Mapping[str, Any], sent: Mapping[str, float], received: Mapping[str, float]
) -> dict[str, float]:
    """Returns rates, and CPU seconds per GB of both ends."""
    gigabytes = given["size"] * given["count"] / 1e9
    rate = gigabytes / sent["seconds"]
    return {
        "gigabytes_per_second": rate,
        "sender_cpu_seconds_per_gigabyte": sent["cpu"] / gigabytes,
        "receiver_cpu_seconds_per_gigabyte": received["cpu"] / gigabytes,
        "cpu_seconds_per_gigabyte": (sent["cpu"] + received["cpu"]) / gigabytes,
    }


def _round_trip(
    given: Mapping[str, Any], sent: Mapping[str, float], received: Mapping[str, float]
) -> dict[str, float]:
    """Returns the microseconds of a round trip."""
    del given, received
    return {f"{name}_microseconds": sent[name] for name in ("p50", "p99")}


FIGURES = {"stream": _throughput, "round_trips": _round_trip}
"""Entry of `worker.MEASUREMENTS` -> what makes figures of both ends' answers."""


def summarized(records: Records) -> dict[str, Any]:
    """Returns name -> measure -> figure -> median, min, max over the rounds."""
    return {
        name: {
            what: {
                figure: harness.spread([each[figure] for each in rounds])
                for figure in rounds[0]
            }
            for what, rounds in measures.items()
        }
        for name, measures in records.items()
    }


def ratio(records: Records, name: str, to: str, what: str, figure: str) -> float:
    """Returns a transport's figure over another one's."""
    own, other = ([each[figure] for each in records[n][what]] for n in (name, to))
    return harness.ratio(own, other)


def targets(records: Records) -> list[dict[str, Any]]:
    """Compares the bridge with bare sockets."""
    found = []
    for name, transport in TRANSPORTS.items():
        to = transport.reference
        if not to:
            continue
        times = functools.partial(ratio, records, name, to)
        for size in SIZES:
            share = times(size, "gigabytes_per_second")
            text = f"{name}: {size}, throughput / {to}"
            found.append(report.at_least(text, share, transport.throughput))
        for size in SIZES:
            share = times(size, "cpu_seconds_per_gigabyte")
            text = f"{name}: {size}, CPU per GB / {to}"
            found.append(report.at_most(text, share, CPU_TARGET))
        share = times("round trip", "p50_microseconds")
        text = f"{name}: round trip p50 / {to}"
        found.append(report.at_most(text, share, ROUND_TRIP_TARGET))
    return found


def measured(rounds: int) -> dict[str, Any]:
    """Measures throughput, CPU and round trips."""
    trips = {"do": "round_trips", "size": worker.SMALL, "count": ROUND_TRIPS}
    plan = {
        text: {
            "do": "stream",
            "size": size,
            "count": max(1, round(SENT_BYTES / size)),
        }
        for text, size in SIZES.items()
    }
    plan |= {"round trip": trips, "round trip, one core": trips | {"one_core": True}}
    records = run_rounds(plan, rounds)
    return {"transports": summarized(records), "targets": targets(records)}


@process.sigterm_as_exit()
def main() -> int:
    """Measures, prints the tables, and writes --out."""
    rounds = flags.FLAGS["rounds"].value
    begin, load = time.monotonic(), os.getloadavg()[0]
    result = measured(rounds)
    about = {
        "load_before_and_after": [load, os.getloadavg()[0]],
        "rounds": rounds,
        "message_bytes": {**SIZES, "round trip": worker.SMALL},
    }
    harness.finish(about | result, begin, bench_report.bridge)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "rounds"])
