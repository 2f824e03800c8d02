"""The bytes that the kernel counts on a session's connections, TLS included.

What a ledger counts are frames. Here is what they come to below TLS, so that nothing
crosses that no ledger has.
"""

import socket
import struct

from nebula_jax.communication.wire import ledger as ledger_lib

# Of struct tcp_info in linux/tcp.h.
_RECEIVED_AT, _SENT_AT, _INFO_BYTES = 128, 200, 256
RECORD_BYTES, RECORD_HEAD_BYTES = 1 << 14, 22  # of TLS 1.3: at most, and around them


def counted(sock: socket.socket) -> tuple[int, int]:
    """Returns the bytes that were sent and received on a TCP connection.

    With TLS; without the heads of TCP and IP, and without what was sent again. (0, 0)
    where the system does not count them.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        sent, resent = struct.unpack_from("QQ", info, _SENT_AT)
        (received,) = struct.unpack_from("Q", info, _RECEIVED_AT)
    except (AttributeError, OSError, struct.error):
        return 0, 0
    return sent - resent, received


def tls_bytes(count: int) -> int:
    """Returns the bytes that TLS 1.3 adds to `count` bytes written at once."""
    return RECORD_HEAD_BYTES * -(-count // RECORD_BYTES)


class Traffic:
    """The traffic of a session's connections, one after the other."""

    def __init__(self, ledger: ledger_lib.Ledger) -> None:
        """Starts without a connection; `ledger` is that of the session."""
        self._ledger = ledger
        self._sent = self._received = self._tls = self._frames = 0

    def opened(self, sock: socket.socket) -> None:
        """Takes a new connection, on which frames have crossed already."""
        beside = counted(sock)[0] - (self._frames_sent() - self._frames)
        self._tls += max(0, beside)  # handshake, and records of those frames

    def closed(self, sock: socket.socket, tls: int) -> None:
        """Takes the end of a connection, to which TLS has added `tls` bytes."""
        sent, received = counted(sock)
        self._sent, self._received = self._sent + sent, self._received + received
        self._tls, self._frames = self._tls + tls, self._frames_sent()

    def _frames_sent(self) -> int:
        entries = self._ledger.entries()
        return sum(entries[kind][1] for kind in entries if kind.startswith("sent"))

    def report(self, sock: socket.socket | None, tls: int) -> dict[str, int]:
        """Returns the bytes so far: with those on the present connection, if any.

        `frames` and `tls` are those sent, as this side counts them; `kernel_sent` and
        `kernel_received` as the kernel does.
        """
        sent, received = counted(sock) if sock is not None else (0, 0)
        return {
            "frames": self._frames_sent(),
            "tls": self._tls + tls,
            "kernel_sent": self._sent + sent,
            "kernel_received": self._received + received,
        }
