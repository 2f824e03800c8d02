"""The transports that scripts/bench_bridge.py compares, in a small file each.

A file has two functions. Both are context managers that yield an `End`:

    listen(meeting)     binds to the address and waits for the other end
    connect(meeting)    connects to it, again and again until it listens

To add a transport, write the file and name it in TRANSPORTS.
"""

import contextlib
import importlib
import pathlib
import socket
import time
from typing import Any, NamedTuple, Protocol

CONNECT_SECONDS = 60.0  # to find the other end, which is started at the same time
RETRY_SECONDS = 0.02


class Meeting(NamedTuple):
    """The settings by which two ends connect."""

    address: tuple[str, int]
    """Host and port of the end that listens."""
    sizes: tuple[int, ...]
    """Bytes: every message has one of these sizes."""
    credentials: pathlib.Path | None
    """This end's folder for `nebula_jax.security.tls`; None for no encryption."""
    line: str
    """Emulated line, as in `wan.from_string`; empty where a transport has none."""


class End(Protocol):
    """One end of a connection; used by one thread."""

    def send(self, buffer: Any) -> None:
        """Sends [size] uint8, which does not change until the peer has answered."""

    def receive(self, size: int) -> Any:
        """Returns the next message; the next `receive` may reuse its memory."""


class Transport(NamedTuple):
    """A transport, as the benchmark uses it."""

    file: str
    """The name of its file in this folder."""
    tls: bool = False
    """True if both ends authenticate."""
    reference: str = ""
    """The transport that this one is compared with: it has a target."""
    throughput_target: float = 0.0
    """The smallest share of the reference's throughput."""
    emulates: bool = False
    """True if it emulates `Meeting.line`."""

    def meet(
        self, side: str, meeting: Meeting
    ) -> contextlib.AbstractContextManager[End]:
        """Calls the file's `listen` or `connect`."""
        return getattr(importlib.import_module(f"{__name__}.{self.file}"), side)(
            meeting
        )


TRANSPORTS = {
    "tcp": Transport("sockets"),
    "tls": Transport("sockets", tls=True),
    "bridge": Transport("ours", reference="tcp", throughput_target=0.8, emulates=True),
    "bridge_tls": Transport(
        "ours", tls=True, reference="tls", throughput_target=0.9, emulates=True
    ),
}


def dial(address: tuple[str, int]) -> socket.socket:
    """Opens a TCP connection as soon as the other end listens."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
