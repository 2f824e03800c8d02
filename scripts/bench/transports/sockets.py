"""Plain sockets: sendall, and recv_into a buffer that is there already.

With TLS, Python's own `ssl` in the same way. This is what the operating system and
OpenSSL give without any protocol on top: the reference for everything else.
"""

import contextlib
import socket
from collections.abc import Iterator

import numpy as np

from nebula_jax.security import tls
from scripts.bench import transports


class _Sockets:
    def __init__(self, sock: socket.socket, sizes: tuple[int, ...]):
        self._socket = sock
        self._buffers = {size: np.zeros(size, np.uint8) for size in sizes}
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, buffer: np.ndarray) -> None:
        self._socket.sendall(buffer)

    def receive(self, size: int) -> np.ndarray:
        view = memoryview(self._buffers[size])
        while len(view):
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionError("the other end closed the connection")
            view = view[count:]
        return self._buffers[size]


@contextlib.contextmanager
def listen(meeting: transports.Meeting) -> Iterator[_Sockets]:
    """Binds and waits; see `transports`."""
    with socket.create_server(meeting.address) as listening:
        sock, _ = listening.accept()
    if meeting.credentials:
        context = tls.server_contexts(meeting.credentials)()
        sock = context.wrap_socket(sock, server_side=True)
    with sock:
        yield _Sockets(sock, meeting.sizes)


@contextlib.contextmanager
def connect(meeting: transports.Meeting) -> Iterator[_Sockets]:
    """Connects; see `transports`."""
    sock = transports.dial(meeting.address)
    if meeting.credentials:
        context = tls.client_contexts(meeting.credentials)()
        sock = context.wrap_socket(sock, server_hostname="discriminator")
    with sock:
        yield _Sockets(sock, meeting.sizes)
