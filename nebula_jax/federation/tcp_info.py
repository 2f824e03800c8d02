"""The kernel's own measurements of a TCP connection (Linux, getsockopt TCP_INFO).

The offsets are those of `struct tcp_info` in linux/tcp.h; the kernel only ever appends
to it, and an older one returns less.
"""

import socket
import struct
from typing import NamedTuple

SIZE = 168  # up to `tcpi_delivery_rate`, the last field that is read
_APP_LIMITED = 7, 1  # byte, and bit of it
_MTU = struct.Struct("=60xI")
_ROUND_TRIP = struct.Struct("=68xI")
_RESENT = struct.Struct("=100xI")
_RATE = struct.Struct("=160xQ")
_SHORTEST = _RESENT.size


class Info(NamedTuple):
    """The measurements of one connection."""

    round_trip: float
    """Seconds, smoothed; 0 if none was measured."""
    mtu: int
    """Bytes of a packet on this path, as far as the kernel has found out."""
    resent: int
    """Packets that were sent more than once."""
    rate: float | None
    """Bytes per second that the peer has lately acknowledged; None if not measured."""
    is_limited: bool
    """True if there was less to send than the line could take: then the line's rate is
    higher than `rate`."""


def read(sock: socket.socket) -> Info | None:
    """Returns the measurements of a connection; None where there are none."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, option, SIZE)
    except OSError:
        return None
    return parse(data)


def parse(data: bytes) -> Info | None:
    """Returns what a kernel has filled in; None if it is too little.

    >>> parse(bytes(SIZE))
    Info(round_trip=0.0, mtu=0, resent=0, rate=None, is_limited=False)
    """
    if len(data) < _SHORTEST:
        return None
    (round_trip,), (mtu,), (resent,) = (
        each.unpack_from(data) for each in (_ROUND_TRIP, _MTU, _RESENT)
    )
    rate = _RATE.unpack_from(data)[0] if len(data) >= _RATE.size else 0
    byte, bit = _APP_LIMITED
    is_limited = bool(data[byte] & bit)
    return Info(round_trip / 1e6, mtu, resent, float(rate) or None, is_limited)
