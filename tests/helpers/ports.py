"""Ports for tests."""

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
