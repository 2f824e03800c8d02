"""ZeroMQ, a pair of sockets without copies at either end."""

import contextlib
from collections.abc import Iterator

import numpy as np
import zmq

from scripts.bench import transports

HIGH_WATER = 2  # messages that wait at each end, as on the bridge


class _Pair:
    def __init__(self, sock: zmq.Socket):
        self._socket = sock

    def send(self, buffer: np.ndarray) -> None:
        self._socket.send(buffer, copy=False)

    def receive(self, size: int) -> memoryview:
        del size
        return self._socket.recv(copy=False).buffer


@contextlib.contextmanager
def _pair(meeting: transports.Meeting, side: str) -> Iterator[_Pair]:
    host, port = meeting.address
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.set_hwm(HIGH_WATER)
        getattr(sock, "bind" if side == "listen" else "connect")(f"tcp://{host}:{port}")
        yield _Pair(sock)


def listen(meeting: transports.Meeting) -> contextlib.AbstractContextManager[_Pair]:
    """Binds and waits; see `transports`."""
    return _pair(meeting, "listen")


def connect(meeting: transports.Meeting) -> contextlib.AbstractContextManager[_Pair]:
    """Connects; see `transports`. ZeroMQ itself tries again."""
    return _pair(meeting, "connect")
