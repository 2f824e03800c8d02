"""The transports of `bench_bridge`: bare sockets and the bridge, with TLS and without.

A transport is a context manager that connects two processes, and yields an `End`.
"""

import contextlib
import functools
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

OWNERS = {"listen": "discriminator", "connect": "generator:0"}
"""Side -> the cluster that its credentials name."""
CONNECT_SECONDS = 60.0  # to find the other end, which is started at the same time
RETRY_SECONDS = 0.02


class Settings(NamedTuple):
    """The settings of one end."""

    side: str
    """`listen` or `connect`."""
    address: tuple[str, int]
    """Host and port of the end that listens."""
    sizes: tuple[int, ...]
    """Bytes: every message has one of these sizes."""
    credentials: pathlib.Path | None
    """This end's folder for `nebula_jax.security.tls`; None for no encryption."""


class End(NamedTuple):
    """One end of a connection; used by one thread."""

    send: Callable[[np.ndarray], Any]
    """Sends [size] uint8, which does not change until the peer has answered."""
    receive: Callable[[int], np.ndarray]
    """Returns the next message, of that size; the next call may reuse its memory."""


@contextlib.contextmanager
def _sockets(given: Settings) -> Iterator[End]:
    """Connects plain sockets: `sendall`, and `recv_into` memory that is there already.

    With TLS, Python's own `ssl` likewise. This is what the operating system and OpenSSL
    give without any protocol on top.
    """
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
    tls: bool
    """True if both ends authenticate."""
    reference: str = ""
    """The bare sockets that the bridge is compared with; empty for those."""
    throughput: float = 0.0
    """The smallest share of the reference's throughput."""


TRANSPORTS = {
    "tcp": Transport(_sockets, tls=False),
    "tls": Transport(_sockets, tls=True),
    "bridge": Transport(_bridge, tls=False, reference="tcp", throughput=0.8),
    "bridge_tls": Transport(_bridge, tls=True, reference="tls", throughput=0.9),
}
