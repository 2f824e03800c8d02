"""One end of a transport of `bench_bridge`, in a process of its own.

    python -m scripts.bench.worker REQUEST

scripts/bench_bridge.py starts both ends with the same request, and each prints what it
measured, as a line of JSON. So the ends stay in step by their own connection, and
nothing else is on the line that is measured. CPU seconds are of this whole process, all
threads, user and system, as `time.process_time` has them: not rounded to 10 ms.
"""

import contextlib
import functools
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import nebula_jax
from nebula_jax.communication import bridge, codec, endpoints
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.wire import frames
from nebula_jax.security import tls

SMALL = 64  # bytes: of a round trip, and of the answer to a measurement's messages
WARM_UP = 100  # round trips before those that count
ROUND_TRIPS = {"round trip": False, "round trip, one core": True}
"""Measurement -> whether both ends share a core."""
OWNERS = {"listen": "discriminator", "connect": "generator:0"}  # side -> its cluster
CONNECT_SECONDS = 60.0  # to find the other end, which is started at the same time
RETRY_SECONDS = 0.02


class Settings(NamedTuple):
    """The settings of one end."""

    side: str  # `listen` or `connect`
    address: tuple[str, int]  # host and port of the end that listens
    sizes: tuple[int, ...]  # bytes: every message has one of these sizes
    credentials: pathlib.Path | None  # folder for `security.tls`; None for plain TCP


class End(NamedTuple):
    """One end of a connection; used by one thread."""

    send: Callable[[np.ndarray], Any]  # [size] uint8, unchanged until the peer answers
    receive: Callable[[int], np.ndarray]  # of that size; the next call may overwrite it


@contextlib.contextmanager
def _sockets(given: Settings) -> Iterator[End]:
    """Connects plain sockets: what the system and OpenSSL give without a protocol."""
    if given.side == "listen":
        with socket.create_server(given.address) as listening:
            sock, _ = listening.accept()
        if given.credentials:
            context = tls.server_contexts(given.credentials)()
            sock = context.wrap_socket(sock, server_side=True)
    else:
        sock = _dial(given.address)
        if given.credentials:
            context = tls.client_contexts(given.credentials)()
            sock = context.wrap_socket(sock, server_hostname=OWNERS["listen"])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffers = {size: np.zeros(size, np.uint8) for size in given.sizes}

    def receive(size: int) -> np.ndarray:
        view = memoryview(buffers[size])
        while len(view):
            count = sock.recv_into(view)
            if count == 0:
                raise ConnectionError("the other end closed the connection")
            view = view[count:]
        return buffers[size]

    with sock:
        yield End(sock.sendall, receive)


def _dial(address: tuple[str, int]) -> socket.socket:
    """Opens a TCP connection as soon as the other end listens."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def _bridge(given: Settings) -> Iterator[End]:
    """Connects the project's bridge: buffers on a link, below the codecs."""
    own = given.credentials
    hello = frames.Hello(OWNERS[given.side], nebula_jax.__version__, {})
    common: dict[str, Any] = {
        "peer_timeout": 60.0,  # seconds
        "reconnect_timeout": 0.0,  # a connection that breaks has failed, here
        "log": functools.partial(print, file=sys.stderr),
    }
    with contextlib.ExitStack() as stack:
        if given.side == "listen":
            listener = listener_lib.Listener(
                endpoints.listen(given.address),
                hello,
                tls=tls.server_contexts(own) if own else None,
                **common,
            )
            opened = stack.enter_context(listener).accept(CONNECT_SECONDS)
        else:
            opened = bridge.connect(
                given.address,
                hello,
                connect_timeout=CONNECT_SECONDS,
                peer=OWNERS["listen"],
                tls=tls.client_contexts(own) if own else None,
                **common,
            )
        link = stack.enter_context(opened)
        channels = {size: number for number, size in enumerate(given.sizes)}
        for size in given.sizes:
            spec = jax.ShapeDtypeStruct((size,), np.uint8)
            link.sender(f"{size} bytes", spec, codec.identity())
            link.receiver(f"{size} bytes", spec, codec.identity())
        if given.side == "listen":
            link.welcome(0)
        else:
            link.wait_for_welcome(CONNECT_SECONDS)
        sent = 0

        def send(buffer: np.ndarray) -> None:
            nonlocal sent
            sent += 1
            link.put_tensor(frames.Tensor(channels[len(buffer)], sent, 0, [buffer]))

        yield End(send, lambda size: link.take_tensor(channels[size]).buffers[0])


class Transport(NamedTuple):
    """A transport, and what it is compared with."""

    open: Callable[[Settings], contextlib.AbstractContextManager[End]]
    tls: bool  # True if both ends authenticate
    reference: str = ""  # bare sockets to compare the bridge with; empty for those
    throughput: float = 0.0  # the smallest share of the reference's


TRANSPORTS = {
    "tcp": Transport(_sockets, tls=False),
    "tls": Transport(_sockets, tls=True),
    "bridge": Transport(_bridge, tls=False, reference="tcp", throughput=0.8),
    "bridge_tls": Transport(_bridge, tls=True, reference="tls", throughput=0.9),
}


def stream(end: End, sends: bool, size: int, count: int) -> dict[str, float]:
    """Sends `count` messages of `size` bytes, one after the other; one answer to all.

    Returns `seconds`, to the answer where it sends, and `cpu`, seconds of this process.
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


def round_trips(end: End, sends: bool, count: int, one_core: bool) -> dict[str, float]:
    """Sends `count` small messages that the other end sends back, one after the other.

    Each end has a core of its own, or both share one; who sends first has the times.
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
    """Keeps this thread on one core: a round trip is much shorter if ends share one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[which]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _answer(end: End, sends: bool) -> None:
    """Confirms from the receiving end; the sending one waits for that."""
    if sends:
        end.receive(SMALL)
    else:
        end.send(np.zeros(SMALL, np.uint8))


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Connects to the other end, measures, and returns the figures."""
    credentials = request["credentials"]
    settings = Settings(
        request["side"],
        ("127.0.0.1", request["port"]),
        (*(size for size, _ in request["streams"].values()), SMALL),
        pathlib.Path(credentials) if credentials else None,
    )
    sends = settings.side == "connect"
    with TRANSPORTS[request["transport"]].open(settings) as end:
        found = {
            name: stream(end, sends, size, count)
            for name, (size, count) in request["streams"].items()
        }
        for name, one_core in ROUND_TRIPS.items():
            found[name] = round_trips(end, sends, request["round_trips"], one_core)
    return {"side": settings.side, "found": found}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
