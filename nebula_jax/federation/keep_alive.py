"""Keep-alive: how a host that has vanished is noticed on a connection that is silent.

A host without power sends no end of its connections. The kernel's own patience is two
hours, for which a trainer that is gone would keep its place.
"""

import contextlib
import socket

IDLE_SECONDS = 10  # of silence before the first probe
PAUSE_SECONDS = 5  # between probes
PROBES = 3  # without an answer: the connection ends, within --reconnect_timeout


def probe(sock: socket.socket) -> None:
    """Has the kernel end a connection whose other host answers nothing for 25 s.

    Args:
      sock: of a connection over TCP.
    """
    with contextlib.suppress(OSError):  # it has ended already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PAUSE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
