"""A line to a service that the one who is served never sees broken.

    address = proxy.open_to(connect)  # on the loopback of this host

JAX ends a process by a crash, at once, when the connection to its service breaks: while
that process computes, before it has reported or saved anything. On this line nothing
more arrives instead, and `members`, which find out who is gone, end the process.

Anybody on this host can connect to its loopback. Only this process is served.
"""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors

LOOPBACK = "127.0.0.1"
CHUNK = 2**16  # bytes
RETRY_SECONDS = 0.2  # after the system refused a connection


def open_to(connect: Callable[[], socket.socket]) -> str:
    """Opens the line; it is there until this process ends.

    `connect` connects to the service, or raises OSError or a NebulaError: it may not be
    there yet. Returns HOST:PORT at which this process reaches the service.
    """
    server = socket.create_server((LOOPBACK, 0))
    _start(_serve, server, connect)
    return f"{LOOPBACK}:{server.getsockname()[1]}"


def carry(served: socket.socket, service: socket.socket) -> None:
    """Carries bytes both ways between two sockets, which are closed in the end."""
    for each in (served, service):
        each.settimeout(None)
    _start(_carry_back, service, served)
    _start(_carry, served, service)


def _start(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _serve(server: socket.socket, connect: Callable[[], socket.socket]) -> None:
    while True:
        try:
            served, _ = server.accept()
        except OSError:  # it went again, or the system has no more
            time.sleep(RETRY_SECONDS)
            continue
        try:
            if _is_own(served):
                carry(served, connect())
                continue
        except (OSError, errors.NebulaError):
            pass
        served.close()  # as if nobody listened: JAX tries again


def _is_own(sock: socket.socket) -> bool:
    """Returns True if this process itself has the other end of a connection."""
    here, there = _address(sock.getsockname()), _address(sock.getpeername())
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            # `fromfd` leaves its copy of what is no socket open.
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            # Addresses of either kind: JAX connects by a socket for both.
            with socket.fromfd(fd, socket.AF_INET6, sock.type) as each:
                name = each.getsockname()
                if _address(name) == there and _address(each.getpeername()) == here:
                    return True
    return False


def _address(name: Any) -> Any:
    """Returns host and port, the same of a socket for IPv4 and one for both."""
    return (name[0].removeprefix("::ffff:"), name[1]) if len(name) > 2 else name


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
