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
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments import shared_flags
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from nebula_jax.security.tls import certificates
from scripts.bench import harness, worker
from scripts.bench import report as bench_report
from scripts.bench.worker import OWNERS, TRANSPORTS

LONGEST_SECONDS = 600.0  # for the measurements of one transport, on a busy machine
SIZES = {"25 MB": 25_165_824, "3 MB": 3_145_728}  # bytes
SENT_BYTES = 300e6  # per measurement
ROUND_TRIPS = 2000
CPU_TARGET = 1.25  # times the reference's, at most
ROUND_TRIP_TARGET = 2.0  # times the reference's, at most

Records = dict[str, dict[str, list[dict[str, float]]]]  # name -> measure -> rounds


def run(name: str, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Measures a transport by two processes, whose credentials are in `folder`.

    Returns side -> measurement -> what the worker found; `connect` sends.
    """
    transport, commands = TRANSPORTS[name], []
    common = {
        "transport": name,
        "port": harness.free_port(),
        "streams": {what: (size, _count(size)) for what, size in SIZES.items()},
        "round_trips": ROUND_TRIPS,
    }
    for side, owner in OWNERS.items():
        credentials = folder / owner.replace(":", "-") if transport.tls else ""
        request = common | {"side": side, "credentials": str(credentials)}
        module = [sys.executable, "-m", "scripts.bench.worker"]
        commands.append([*module, json.dumps(request)])
    found = harness.together(commands, LONGEST_SECONDS)
    return {each["side"]: each["found"] for each in found}


def _count(size: int) -> int:
    """Returns how many messages of a size are sent."""
    return max(1, round(SENT_BYTES / size))


def run_rounds(rounds: int) -> Records:
    """Takes the measures of every transport, round by round, turn by turn."""
    names = list(TRANSPORTS)
    records: Records = {name: collections.defaultdict(list) for name in names}
    with tempfile.TemporaryDirectory(prefix="bench") as temporary:
        folder = pathlib.Path(temporary)
        certificates.issue_for_run(folder, OWNERS.values())
        for number in range(rounds):
            process.message(f"round {number + 1} of {rounds}")
            for name in names:
                found = run(name, folder)
                sent, received = found["connect"], found["listen"]
                for what, size in SIZES.items():
                    figures = _throughput(size, sent[what], received[what])
                    records[name][what].append(figures)
                for what in worker.ROUND_TRIPS:
                    records[name][what].append(sent[what])
            names.reverse()  # so that none is always the first
    return records


def _throughput(
    size: int, sent: Mapping[str, float], received: Mapping[str, float]
) -> dict[str, float]:
    gigabytes = size * _count(size) / 1e9
    rate = gigabytes / sent["seconds"]
    return {
        "gigabytes_per_second": rate,
        "sender_cpu_seconds_per_gigabyte": sent["cpu"] / gigabytes,
        "receiver_cpu_seconds_per_gigabyte": received["cpu"] / gigabytes,
        "cpu_seconds_per_gigabyte": (sent["cpu"] + received["cpu"]) / gigabytes,
    }


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


def _columns() -> dict[str, str]:
    """Returns title -> the form of a cell, of the name and figures of a transport."""
    found, rate = {"transport": "{name}"}, "gigabytes_per_second"
    for size in ("25 MB", "3 MB"):
        middle, *edges = (
            f"{{{size}[{rate}][{each}]:.2f}}" for each in ("median", "min", "max")
        )
        found[f"{size}, GB/s"] = f"{middle} ({'-'.join(edges)})"
    for size in ("25 MB", "3 MB"):
        sender, receiver, both = (
            f"{{{size}[{end}cpu_seconds_per_gigabyte][median]:.2f}}"
            for end in ("sender_", "receiver_", "")
        )
        found[f"CPU s/GB, {size}"] = f"{sender}+{receiver}={both}"
    for title, trip in zip(
        ("64 B µs, p50 / p99", "on one core"), worker.ROUND_TRIPS, strict=True
    ):
        found[title] = " / ".join(
            f"{{{trip}[{each}_microseconds][median]:.0f}}" for each in ("p50", "p99")
        )
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    before, after = result["load_before_and_after"]
    rows = [{"name": name, **each} for name, each in result["transports"].items()]
    return report.join(
        report.heading(
            result,
            f"{result['rounds']} rounds, load {before:.1f} before and {after:.1f}"
            " after",
        ),
        "Medians of the rounds; of throughput with the smallest and the largest.",
        bench_report.table_of(rows, _columns()),
        report.targets(result["targets"]),
    )


@process.sigterm_as_exit()
def main() -> int:
    """Measures, prints the tables, and writes --out."""
    rounds = flags.FLAGS["rounds"].value
    begin, load = time.monotonic(), os.getloadavg()[0]
    records = run_rounds(rounds)
    about = {
        "load_before_and_after": [load, os.getloadavg()[0]],
        "rounds": rounds,
        "message_bytes": {**SIZES, "round trip": worker.SMALL},
        "transports": summarized(records),
        "targets": targets(records),
    }
    harness.finish(about, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "rounds"])
