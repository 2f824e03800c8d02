"""Ports for tests."""

import contextlib
import socket

_HELD: list[socket.socket] = []


def free_port() -> int:
    """Returns a port that is free, and that nobody else gets meanwhile: it stays bound
    here. With SO_REUSEADDR, as our listeners have it, Linux lets one that names the
    port listen there, but gives it to no connection and to no listener that leaves the
    choice: two tests at once get different ones."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return held.getsockname()[1]


def has_ipv6() -> bool:
    """Returns True if this host can connect to itself by IPv6."""
    with (
        contextlib.suppress(OSError),
        socket.create_server(("::1", 0), family=socket.AF_INET6),
    ):
        return True
    return False
