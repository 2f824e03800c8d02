"""A line to a service that the one who is served never sees broken.

    address = proxy.open_to("10.0.0.1:1234")  # on the loopback of this host

JAX ends a process by a crash, at once, when the connection to its service breaks: while
that process computes, before it has reported or saved anything. On this line nothing
more arrives instead, and `members`, which find out who is gone, end the process.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10.0
CHUNK = 2**16  # bytes


def open_to(service: str) -> str:
    """Opens the line; it is there until this process ends.

    Args:
      service: HOST:PORT of the service, which may not be there yet.

    Returns:
      HOST:PORT at which this process reaches the service.
    """
    host, port = service.rsplit(":", 1)
    server = socket.create_server((LOOPBACK, 0))
    _start(_serve, server, (host.strip("[]"), int(port)))
    return f"{LOOPBACK}:{server.getsockname()[1]}"


def _start(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _serve(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        served, _ = server.accept()
        try:
            service = socket.create_connection(address, CONNECT_SECONDS)
        except OSError:
            served.close()  # as if nobody listened: it tries again
            continue
        service.settimeout(None)
        _start(_carry_back, service, served)
        _start(_carry, served, service)


def _carry(served: socket.socket, service: socket.socket) -> None:
    """Carries bytes to the service, and drops them once it has gone."""
    with served, service, contextlib.suppress(OSError):
        while data := served.recv(CHUNK):
            with contextlib.suppress(OSError):
                service.sendall(data)
        service.shutdown(socket.SHUT_RDWR)  # which ends `_carry_back`


def _carry_back(service: socket.socket, served: socket.socket) -> None:
    """Carries bytes from the service, but not its end."""
    with contextlib.suppress(OSError):
        while data := service.recv(CHUNK):
            served.sendall(data)
