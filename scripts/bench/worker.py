"""One end of one transport, in a process of its own.

    python -m scripts.bench.worker REQUEST

scripts/bench_bridge.py starts both ends with the same plan, and each prints what it
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


def stream(end: transports.End, sends: bool, size: int, count: int) -> dict[str, float]:
    """Sends `count` messages of `size` bytes, one after the other; one answer to all.

    Returns:
      seconds: from the first byte to the answer, where it sends.
      cpu: seconds of this process.
    """
    message = _message(size)
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
    end: transports.End, sends: bool, size: int, count: int, one_core: bool = False
) -> dict[str, float]:
    """Sends `count` messages that the other end sends back, each after the other.

    Each end has a core of its own, or both share one.

    Returns:
      p50, p99: microseconds, where it sends first.
    """
    message = np.zeros(size, np.uint8)
    times = np.zeros(WARM_UP + count)
    with _on_a_core(0 if sends or one_core else -1):
        for number in range(WARM_UP + count):
            if sends:
                start = time.perf_counter_ns()
                end.send(message)
                end.receive(size)
                times[number] = (time.perf_counter_ns() - start) / 1e3
            else:
                end.receive(size)
                end.send(message)
    p50, p99 = np.percentile(times[WARM_UP:], [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


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


def _message(size: int) -> np.ndarray:
    """Draws [size] uint8."""
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def _answer(end: transports.End, sends: bool) -> None:
    """Confirms from the receiving end; the sending one waits for that."""
    if sends:
        end.receive(SMALL)
    else:
        end.send(np.zeros(SMALL, np.uint8))


MEASUREMENTS = {each.__name__: each for each in (stream, round_trips)}


def main(request: dict[str, Any]) -> None:
    """Connects to the other end, measures, and prints the figures."""
    credentials = request["credentials"]
    settings = transports.Settings(
        request["side"],
        ("127.0.0.1", request["port"]),
        tuple(request["sizes"]),
        pathlib.Path(credentials) if credentials else None,
    )
    with transports.TRANSPORTS[request["transport"]].open(settings) as end:
        found = {
            name: MEASUREMENTS[given.pop("do")](
                end, settings.side == "connect", **given
            )
            for name, given in request["plan"].items()
        }
    print(json.dumps({"side": settings.side, "found": found}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
