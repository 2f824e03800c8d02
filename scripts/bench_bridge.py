"""Measures the bridge beside plain sockets and other people's transports.

    python -m scripts.bench_bridge                         # all that is installed
    python -m scripts.bench_bridge --transports=tcp,bridge --rounds=2 --nooverlap
    python -m scripts.bench_bridge --netns=60mbit          # on a slow line; needs root

Two processes per transport, all there from the start and one pair at work at a time. In
every round each transport has its turn, so that what else the machine does hits all
alike; figures are medians of the rounds, and ratios medians of the rounds' ratios.

    throughput   tensors of 25,165,824 bytes (25 MB: a micro-batch of the paper's hidden
                 states in fp32, 64 x 128 x 768) and of an eighth of that (3 MB), sent
                 one after the other with one answer at the end
    CPU          seconds per GB, of sender plus receiver, all their threads
    round trip   64 bytes there and back, each end on a core of its own, as on machines
                 of their own; and with both on one, where nobody has to be woken
    overlap      how much slower the median step of a jitted computation is while the
                 same process sends 25 MB at an emulated 60 Mbit/s (3.4 s). The process
                 that receives is on the same cores here; beside it is the CPU that both
                 take for such a message when nobody computes, and the sender's share of
                 all that the cores could have computed meanwhile

Messages end in memory of the receiver's, and are compared before anything is timed.
--netns shapes in the kernel instead, see scripts/wan_netns.sh, and measures goodput.
requirements-bench.txt has the optional transports. The status is 0, targets met or not,
and 1 if a transport failed.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from experiments import lifecycle, run_report, shared_flags
from nebula_jax import errors
from nebula_jax.security import certificates
from scripts.bench import transports
from scripts.bench.transports import pair as pair_lib
from scripts.bench.transports import tables, worker
from scripts.bench.transports.pair import Pair
from scripts.out import OUT

NAMES = flags.DEFINE_list(
    "transports", [], "What to measure; empty for all that is installed."
)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each transport.", lower_bound=1)
MEGABYTES = flags.DEFINE_float(
    "megabytes", None, "Sent per measurement; 300 if not given, 25 with --netns."
)
NETNS = flags.DEFINE_string(
    "netns", "", "Rate of a line that the kernel shapes, such as 60mbit."
)
OVERLAP = flags.DEFINE_bool("overlap", True, "Whether to measure overlap as well.")
flags.declare_key_flag("out")  # for the figures, JSON

SIZES = {"25 MB": 25_165_824, "3 MB": 3_145_728}  # bytes
ROUND_TRIPS = 2000
EMULATED = "60mbit"  # the slowest line of section 4.2
CPU_TARGET = 1.25  # times the reference's, at most
ROUND_TRIP_TARGET = 2.0  # times the reference's, at most
GOODPUT_TARGET = 0.99  # of plain TCP's, at least
SLOWDOWN_TARGET = 0.02  # at most

Measure = Callable[[Pair], dict[str, float]]  # figure -> value
Records = dict[str, dict[str, list[dict[str, float]]]]  # name -> measure -> rounds


class Bench:
    """The pairs of a run; one that fails is left out from then on."""

    def __init__(self):
        self.pairs: list[Pair] = []
        self.left_out: dict[str, str] = {}

    def each(self, what: str, do: Callable[[Pair], Any]) -> None:
        """Does something with one pair after the other."""
        for pair in list(self.pairs):
            try:
                do(pair)
            except errors.NebulaError as error:
                lifecycle.say(f"left out from here on ({what}): {error}")
                self.left_out[pair.name] = str(error)
                self.pairs.remove(pair)
                pair.close(at_once=True)


@contextlib.contextmanager
def started(names: Sequence[str], line: str = "") -> Iterator[Bench]:
    """Starts the transports' processes, lets them meet, and ends them.

    Args:
      names: in `transports.TRANSPORTS`.
      line: to be emulated, as in `wan.from_string`.
    """
    bench = Bench()
    sizes = [*SIZES.values(), worker.SMALL]
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        path = pathlib.Path(folder)
        certificates.issue_for_run(path, pair_lib.OWNERS.values())
        done = False
        try:
            for name in names:
                pair = Pair(name, sizes, path, line=line, netns=NETNS.value)
                bench.pairs.append(pair)
            bench.each("meeting", Pair.met)
            yield bench
            done = True
        finally:
            for pair in bench.pairs:
                pair.close(at_once=not done)


def run_rounds(bench: Bench, measures: dict[str, Measure]) -> Records:
    """Every transport's figures: measure by measure, round by round, turn by turn."""
    records: Records = {
        pair.name: {what: [] for what in measures} for pair in bench.pairs
    }
    for number in range(ROUNDS.value):
        lifecycle.say(f"round {number + 1} of {ROUNDS.value}")
        for what, measure in measures.items():

            def record(pair, what=what, measure=measure):
                records[pair.name][what].append(measure(pair))

            bench.each(what, record)
        bench.pairs.reverse()  # nobody is always the first
    return {name: records[name] for name in records if name not in bench.left_out}


def verify(bench: Bench, sizes: Sequence[int]) -> None:
    """Compares what arrives with what was sent: nobody is fast by cheating."""
    for size in sizes:
        bench.each("verify", lambda pair: pair.measure("verify", size=size, count=3))  # noqa: B023


def throughput(pair: Pair, size: int) -> dict[str, float]:
    """GB/s, and CPU seconds per GB of both ends."""
    count = max(1, round(_megabytes() * 1e6 / size))
    answers = pair.measure("stream", size=size, count=count)
    gigabytes = size * count / 1e9
    sender, receiver = answers["connect"]["cpu"], answers["listen"]["cpu"]
    return {
        "gigabytes_per_second": gigabytes / answers["connect"]["seconds"],
        "sender_cpu_seconds_per_gigabyte": sender / gigabytes,
        "receiver_cpu_seconds_per_gigabyte": receiver / gigabytes,
        "cpu_seconds_per_gigabyte": (sender + receiver) / gigabytes,
    }


def round_trip(pair: Pair, one_core: bool = False) -> dict[str, float]:
    """Microseconds."""
    asked = {"size": worker.SMALL, "count": ROUND_TRIPS, "one_core": one_core}
    answers = pair.measure("round_trips", **asked)
    return {f"{name}_microseconds": answers["connect"][name] for name in ("p50", "p99")}


def _megabytes() -> float:
    if MEGABYTES.value is not None:
        return MEGABYTES.value
    return 25.0 if NETNS.value else 300.0


def summarised(records: Records) -> dict[str, Any]:
    """Name -> measure -> figure -> its median, min, max over the rounds."""
    return {
        name: {
            what: {
                figure: _spread([each[figure] for each in rounds])
                for figure in rounds[0]
            }
            for what, rounds in measures.items()
        }
        for name, measures in records.items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(records: Records, name: str, to: str, what: str, figure: str) -> float:
    """The median of the rounds' ratios: neighbours in time share their noise."""
    both = zip(records[name][what], records[to][what], strict=True)
    return statistics.median(ours[figure] / theirs[figure] for ours, theirs in both)


def target(
    text: str, value: float, least: float = 0.0, most: float = 0.0
) -> dict[str, Any]:
    """A figure beside its limit, of which there is one."""
    met = value >= least if least else value <= most
    limit = {"at_least": least} if least else {"at_most": most}
    return {"what": text, "value": value, **limit, "met": met}


def targets(records: Records) -> list[dict[str, Any]]:
    """What a transport with a reference is to reach, on a line without limit."""
    found = []
    for name in records:
        transport = transports.TRANSPORTS[name]
        to = transport.reference
        if to not in records:
            continue
        times = functools.partial(ratio, records, name, to)
        for size in SIZES:
            share = times(size, "gigabytes_per_second")
            least = transport.throughput_target
            found.append(target(f"{name}: {size}, throughput / {to}", share, least))
        for size in SIZES:
            share = times(size, "cpu_seconds_per_gigabyte")
            text = f"{name}: {size}, CPU per GB / {to}"
            found.append(target(text, share, most=CPU_TARGET))
        share = times("round trip", "p50_microseconds")
        text = f"{name}: round trip p50 / {to}"
        found.append(target(text, share, most=ROUND_TRIP_TARGET))
    return found


def on_loopback(names: Sequence[str]) -> dict[str, Any]:
    """Throughput, CPU and round trips, and the overlap of those that emulate a line."""
    measures: dict[str, Measure] = {
        text: functools.partial(throughput, size=size) for text, size in SIZES.items()
    }
    measures["round trip"] = round_trip
    measures["round trip, one core"] = functools.partial(round_trip, one_core=True)
    with started(names) as bench:
        verify(bench, [*SIZES.values(), worker.SMALL])
        records = run_rounds(bench, measures)
    result = {
        "transports": summarised(records),
        "targets": targets(records),
        "left_out": bench.left_out,
    }
    emulating = [name for name in records if transports.TRANSPORTS[name].emulates]
    if OVERLAP.value and emulating:
        with started(emulating, line=EMULATED) as bench:
            result["overlap"] = overlap(bench)
        result["left_out"] |= bench.left_out
        for name, each in result["overlap"].items():
            text = f"{name}: CPU that sending takes from computing, 25 MB at {EMULATED}"
            found = target(text, each["sender_share"], most=SLOWDOWN_TARGET)
            result["targets"].append(found)
            text = f"{name}: computing is slower while 25 MB leave at {EMULATED}"
            found = target(text, each["slowdown"]["median"], most=SLOWDOWN_TARGET)
            if each["noise"]["median"] > SLOWDOWN_TARGET:
                found["met"] = None  # the machine is too busy to tell
            result["targets"].append(found)
    return result


def overlap(bench: Bench) -> dict[str, Any]:
    """Name -> how much slower the sender computes while it sends, 0.01 being 1 %.

    Beside it `noise`: how much the same computation differs from itself when nothing is
    sent. A slowdown below it says nothing.
    """
    found: dict[str, Any] = {}

    def measure(pair: Pair) -> None:
        lifecycle.say(f"overlap: {pair.name}")
        asked = {"size": SIZES["25 MB"], "rounds": ROUNDS.value}
        answers = pair.measure("overlap", **asked)
        alone, sending = answers["connect"]["alone"], answers["connect"]["sending"]
        around = [(before + after) / 2 for before, after in itertools.pairwise(alone)]
        both = zip(sending, around, strict=True)
        found[pair.name] = {
            "slowdown": _spread([with_it / without - 1 for with_it, without in both]),
            "noise": _spread(
                [abs(after / before - 1) for before, after in itertools.pairwise(alone)]
            ),
            "alone_milliseconds": _spread(alone),
            "left_seconds": _spread(answers["connect"]["left"]),
            "sender_cpu_seconds": answers["connect"]["cpu"],
            "sender_share": answers["connect"]["share"],
            "receiver_cpu_seconds": answers["listen"]["cpu"],
        }

    bench.each("overlap", measure)
    return found


def on_a_shaped_line(names: Sequence[str]) -> dict[str, Any]:
    """Goodput in Mbit/s: the payload's bits, from the first byte to the answer.

    Raises:
      errors.NebulaError: if there can be no such line here.
    """
    script = [pair_lib.WAN_NETNS, NETNS.value, "--", "true", "--", "true"]
    probe = subprocess.run(script, capture_output=True, text=True)
    if probe.returncode:
        raise errors.NebulaError(f"--netns={NETNS.value}: {probe.stderr.strip()}")

    def goodput(pair: Pair) -> dict[str, float]:
        figures = throughput(pair, SIZES["25 MB"])
        return figures | {"megabits_per_second": figures["gigabytes_per_second"] * 8e3}

    with started(names) as bench:
        verify(bench, [SIZES["3 MB"], worker.SMALL])  # 25 MB take seconds here
        records = run_rounds(bench, {"25 MB": goodput})
    found = [
        target(
            f"{name}: 25 MB, goodput / tcp",
            ratio(records, name, "tcp", "25 MB", "megabits_per_second"),
            GOODPUT_TARGET,
        )
        for name in records
        if transports.TRANSPORTS[name].reference and "tcp" in records
    ]
    return {
        "rate": NETNS.value,
        "transports": summarised(records),
        "targets": found,
        "left_out": bench.left_out,
    }


def chosen() -> list[str]:
    """The names of the transports to measure.

    Raises:
      clusters.FlagError: for one that is not there.
    """
    known = transports.TRANSPORTS
    if not NAMES.value:
        names = [name for name in known if known[name].is_installed]
        if NETNS.value:  # whatever has a target, and what it is held against
            ours = [name for name in names if known[name].reference]
            names = [*(known[name].reference for name in ours), *ours]
        return names
    for name in NAMES.value:
        if name not in known:
            raise shared_flags.FlagError(
                f"--transports: no {name!r}; there are {', '.join(known)}"
            )
        if not known[name].is_installed:
            raise shared_flags.FlagError(
                f"--transports: {name} needs {known[name].needs}, which is not"
                " installed; see requirements-bench.txt"
            )
    return list(dict.fromkeys(NAMES.value))


def main() -> int:
    """Measures, prints, and writes --out."""
    names = chosen()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    start, load = time.monotonic(), os.getloadavg()[0]
    result = on_a_shaped_line(names) if NETNS.value else on_loopback(names)
    result = {
        "command": shared_flags.command(),
        "commit": shared_flags.commit(),
        "hardware": run_report.hardware(),
        "seconds": round(time.monotonic() - start, 1),
        "load_before_and_after": [load, os.getloadavg()[0]],
        "rounds": ROUNDS.value,
        "message_bytes": {**SIZES, "round trip": worker.SMALL},
        **result,
    }
    tables.show(result)
    if OUT.value:
        path = pathlib.Path(OUT.value)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 1 if result["left_out"] else 0


if __name__ == "__main__":
    lifecycle.run(main)
