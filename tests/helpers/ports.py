"""Ports for tests."""

import contextlib
import random
import socket

NOBODYS = range(15_000, 30_000)
"""Below those that the kernel gives to connections, as of tests that run beside."""


def free_port() -> int:
    """Returns a port that is free, and that nobody gets by chance."""
    while True:
        port = random.SystemRandom().choice(NOBODYS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def has_ipv6() -> bool:
    """Returns True if this host can connect to itself by IPv6."""
    with (
        contextlib.suppress(OSError),
        socket.create_server(("::1", 0), family=socket.AF_INET6),
    ):
        return True
    return False
