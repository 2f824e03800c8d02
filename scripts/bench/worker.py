"""One end of one transport, in a process of its own.

    python -m scripts.bench.worker REQUEST

scripts/bench_bridge.py starts both ends with the same request, and each prints what it
measured, as a line of JSON. So the ends stay in step by their own connection, and
nothing else is on the line that is measured.

CPU seconds are those of this whole process, all threads, user and system together, as
`time.process_time` has them: the sum of `os.times`, but not rounded to 10 ms.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts.bench import transports

SMALL = 64  # bytes: of a round trip, and of the answer to a measurement's messages
WARM_UP = 100  # round trips before those that count
ROUND_TRIPS = {"round trip": False, "round trip, one core": True}
"""Measurement -> whether both ends share a core."""


def stream(end: transports.End, sends: bool, size: int, count: int) -> dict[str, float]:
    """Sends `count` messages of `size` bytes, one after the other; one answer to all.

    Returns:
      seconds: from the first byte to the answer, where it sends.
      cpu: seconds of this process.
    """
    message = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    _answer(end, sends)  # both are there
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        if sends:
            end.send(message)
        else:
            end.receive(size)
    _answer(end, sends)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu": time.process_time() - cpu}


def round_trips(
    end: transports.End, sends: bool, count: int, one_core: bool
) -> dict[str, float]:
    """Sends `count` small messages that the other end sends back, one after the other.

    Each end has a core of its own, or both share one.

    Returns:
      p50_microseconds, p99_microseconds: where it sends first.
    """
    message = np.zeros(SMALL, np.uint8)
    times = np.zeros(WARM_UP + count)
    with _on_a_core(0 if sends or one_core else -1):
        for number in range(WARM_UP + count):
            if sends:
                start = time.perf_counter_ns()
                end.send(message)
                end.receive(SMALL)
                times[number] = (time.perf_counter_ns() - start) / 1e3
            else:
                end.receive(SMALL)
                end.send(message)
    p50, p99 = np.percentile(times[WARM_UP:], [50, 99])
    return {"p50_microseconds": float(p50), "p99_microseconds": float(p99)}


@contextlib.contextmanager
def _on_a_core(which: int) -> Iterator[None]:
    """Keeps this thread on one core.

    Else the scheduler would put both ends on one core or on two as it likes. On one, a
    round trip takes a fraction of the time: no core has to be woken.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[which]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _answer(end: transports.End, sends: bool) -> None:
    """Confirms from the receiving end; the sending one waits for that."""
    if sends:
        end.receive(SMALL)
    else:
        end.send(np.zeros(SMALL, np.uint8))


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Connects to the other end, measures, and returns the figures."""
    credentials = request["credentials"]
    settings = transports.Settings(
        request["side"],
        ("127.0.0.1", request["port"]),
        (*(size for size, _ in request["streams"].values()), SMALL),
        pathlib.Path(credentials) if credentials else None,
    )
    sends = settings.side == "connect"
    with transports.TRANSPORTS[request["transport"]].open(settings) as end:
        found = {
            name: stream(end, sends, size, count)
            for name, (size, count) in request["streams"].items()
        }
        for name, one_core in ROUND_TRIPS.items():
            found[name] = round_trips(end, sends, request["round_trips"], one_core)
    return {"side": settings.side, "found": found}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
