"""One end of one transport, in a process of its own.

    python -m scripts.bench.transports.worker REQUEST

scripts/bench_bridge.py starts it. REQUEST is JSON with the path of a Unix socket. Over
it the benchmark requests measurements, one JSON line each, and receives a line of
figures for each. When that socket closes, however the benchmark died, this process ends
too. (A Unix socket, because its path is valid in another network namespace as well, and
its messages are not on the line that is measured.)

CPU seconds are those of this whole process, all threads, user and system together, as
`time.process_time` has them: the sum of `os.times`, but not rounded to 10 ms.
"""

import contextlib
import itertools
import json
import os
import pathlib
import queue
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from scripts.bench import transports

SMALL = 64  # bytes: of a round trip, and of `ready` and `done`
WARM_UP = 100  # round trips before those that count
OVERLAP_SECONDS = 2.5  # of computing: less than the line takes for the tensor


def verify(end: transports.End, sends: bool, size: int, count: int) -> dict[str, Any]:
    """Sends `count` different messages of `size` bytes and compares their checksums."""
    messages = [
        np.random.default_rng([size, number]).integers(0, 256, size, np.uint8)
        for number in range(count)
    ]
    for number, message in enumerate(messages):
        if sends:
            end.send(message)
        elif zlib.crc32(end.receive(size)) != zlib.crc32(message):
            raise ValueError(f"message {number} of {size} bytes came out different")
    _answer(end, sends)
    return {}


def stream(end: transports.End, sends: bool, size: int, count: int) -> dict[str, float]:
    """Sends `count` messages of `size` bytes, one after the other; one answer to all.

    Returns:
      seconds: from the first byte to the answer, where it sends.
      cpu: seconds of this process.
    """
    message = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    _answer(end, sends)  # both are there
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        if sends:
            end.send(message)
        else:
            end.receive(size)
    _answer(end, sends)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
    }


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
    round trip takes a fraction of the time: nobody has to be woken.
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[which]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def overlap(end: transports.End, sends: bool, size: int, rounds: int) -> dict[str, Any]:
    """Computes alone and while a message of `size` bytes leaves, in turns.

    Returns:
      alone, sending: milliseconds of the median step of a jitted computation, `rounds`
        numbers; alone has one more, so that each of sending has one on either side.
      left: seconds that the message took to arrive once the computation was done; where
        there are none, the message did not last as long.
      cpu: seconds of this process for a message while nobody computes.
      share: of what this machine's cores could have computed until it had arrived.
    """
    streamed = stream(end, sends, size, 1)
    cpu = streamed["cpu"]
    if not sends:
        for _ in range(rounds):
            end.receive(size)
            _answer(end, sends)
        return {"cpu": cpu}
    share = cpu / (streamed["seconds"] * os.cpu_count())
    compute = _computation()
    message = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    alone, sending, left = [compute()], [], []
    for _ in range(rounds):
        end.send(message)
        sending.append(compute())
        start = time.perf_counter()
        _answer(end, sends)
        left.append(time.perf_counter() - start)
        alone.append(compute())
    times = {"alone": alone, "sending": sending, "left": left}
    return {**times, "cpu": cpu, "share": share}


def _computation() -> Callable[[], float]:
    """Takes OVERLAP_SECONDS for some steps; returns milliseconds of the median one.

    Other programs come in bursts, which the median of many steps does not see. A thread
    that moves bytes all the time takes its share of every step.
    """
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(hidden, kernel):
        return jax.lax.fori_loop(
            0, 4, lambda _, hidden: jnp.tanh(hidden @ kernel), hidden
        )

    hidden = jnp.ones((1024, 768))
    kernel = jnp.eye(768) * 0.5
    step(hidden, kernel).block_until_ready()  # compiles

    def run() -> float:
        times = [time.perf_counter()]
        while times[-1] < times[0] + OVERLAP_SECONDS:
            step(hidden, kernel).block_until_ready()
            times.append(time.perf_counter())
        return 1e3 * float(np.median(np.diff(times)))

    return run


def _answer(end: transports.End, sends: bool) -> None:
    """Confirms from the receiving end; the sending one waits for that."""
    if sends:
        end.receive(SMALL)
    else:
        end.send(np.zeros(SMALL, np.uint8))


MEASUREMENTS = {
    "verify": verify,
    "stream": stream,
    "round_trips": round_trips,
    "overlap": overlap,
}


def _requests(control: TextIO) -> Iterator[dict[str, Any]]:
    """Yields the benchmark's requests; ends the process when the benchmark is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read():
        for line in control:
            lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main(request: dict[str, Any]) -> None:
    """Connects to the other end, and measures until the request to end."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(request["control"])
    control = sock.makefile("rw")

    def reply(**answer: Any) -> None:
        control.write(json.dumps(answer) + "\n")
        control.flush()

    requests = _requests(control)
    sends = request["side"] == "connect"
    try:
        credentials = request["credentials"]
        meeting = transports.Meeting(
            (os.environ.get("WAN_A", "127.0.0.1"), request["port"]),
            tuple(request["sizes"]),
            pathlib.Path(credentials) if credentials else None,
            request["line"],
        )
        transport = transports.TRANSPORTS[request["transport"]]
        with transport.meet(request["side"], meeting) as end:
            reply()
            for each in itertools.takewhile(lambda each: each["do"], requests):
                measurement = MEASUREMENTS[each.pop("do")]
                reply(**measurement(end, sends, **each))
    except Exception as error:  # whatever a transport raises is a result
        reply(error=f"{type(error).__name__}: {error}")
        os._exit(1)  # its threads might hang


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
