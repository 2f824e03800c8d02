"""The byte ledger of a session: by direction, kind and channel, and below TLS."""

import socket
import struct

from nebula_jax.communication.wire import frames

SENT, RECEIVED = "sent", "received"
DAMAGED = "damaged frames"
# Of struct tcp_info in linux/tcp.h.
_RTT_AT, _RECEIVED_AT, _SENT_AT, _INFO_BYTES = 68, 128, 200, 256
RECORD_BYTES, RECORD_HEAD_BYTES = 1 << 14, 22  # of TLS 1.3: at most, and around them


class Ledger:
    """The frames and bytes that crossed; what is sent again counts again."""

    def __init__(self) -> None:
        self._channels: dict[str, list[str]] = {SENT: [], RECEIVED: []}
        # (direction, name) -> [frames, bytes]
        self._entries: dict[tuple[str, str], list[int]] = {}

    def add_channel(self, direction: str, name: str) -> int:
        """Names the next channel of a direction; returns its number, from 0."""
        self._channels[direction].append(name)
        return len(self._channels[direction]) - 1

    def channel(self, direction: str, number: int) -> str:
        """Returns the name of a channel."""
        return self._channels[direction][number]

    def count(self, direction: str, message: frames.Message, nbytes: int) -> None:
        """Enters the frame of a message; a tensor counts under its channel's name."""
        if type(message) is frames.Tensor:
            name = self.channel(direction, message.channel)
        else:
            name = type(message).__name__
        entry = self._entries.get((direction, name))
        if entry is None:
            entry = self._entries[direction, name] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes

    def count_damage(self) -> None:
        """Enters a frame that arrived damaged; its bytes are not counted."""
        self._entries.setdefault((RECEIVED, DAMAGED), [0, 0])[0] += 1

    def bytes_moved(self, direction: str) -> int:
        """Returns all bytes of a direction."""
        entries = list(self._entries.items())
        return sum(entry[1] for (way, _), entry in entries if way == direction)

    def entries(self) -> dict[str, list[int]]:
        """Returns `sent Hello`, `received tokens` and so on -> [frames, bytes]."""
        return {
            f"{direction} {name}": list(entry)
            for (direction, name), entry in list(self._entries.items())
        }


def _tcp_info(sock: socket.socket) -> bytes:
    """Returns what the kernel knows of a TCP connection; zeros where it knows less."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (AttributeError, OSError):
        info = b""
    return info.ljust(_INFO_BYTES, b"\0")


def counted(sock: socket.socket) -> tuple[int, int]:
    """Returns the bytes that were sent and received on a TCP connection.

    With TLS; without the heads of TCP and IP, and without what was sent again. (0, 0)
    where the system does not count them.
    """
    info = _tcp_info(sock)
    sent, resent = struct.unpack_from("QQ", info, _SENT_AT)
    return sent - resent, struct.unpack_from("Q", info, _RECEIVED_AT)[0]


def round_trip(sock: socket.socket) -> float:
    """Returns the seconds of a round trip, smoothed by the kernel; 0 if not known."""
    return struct.unpack_from("I", _tcp_info(sock), _RTT_AT)[0] / 1e6  # microseconds


def tls_bytes(count: int) -> int:
    """Returns the bytes that TLS 1.3 adds to `count` bytes written at once."""
    return RECORD_HEAD_BYTES * -(-count // RECORD_BYTES)


class Traffic:
    """The traffic of a session's connections, one after the other."""

    def __init__(self, ledger: Ledger) -> None:
        """Starts without a connection; `ledger` is that of the session."""
        self._ledger = ledger
        self._sent = self._received = self._tls = self._frames = 0

    def opened(self, sock: socket.socket) -> None:
        """Takes a new connection, on which frames have crossed already."""
        beside = counted(sock)[0] - (self._ledger.bytes_moved(SENT) - self._frames)
        self._tls += max(0, beside)  # handshake, and records of those frames

    def closed(self, sock: socket.socket, tls: int) -> None:
        """Takes the end of a connection, to which TLS has added `tls` bytes."""
        sent, received = counted(sock)
        self._sent, self._received = self._sent + sent, self._received + received
        self._tls, self._frames = self._tls + tls, self._ledger.bytes_moved(SENT)

    def report(self, sock: socket.socket | None, tls: int) -> dict[str, int]:
        """Returns the bytes so far: with those on the present connection, if any.

        `frames` and `tls` are those sent, as this side counts them; `kernel_sent` and
        `kernel_received` as the kernel does.
        """
        sent, received = counted(sock) if sock is not None else (0, 0)
        return {
            "frames": self._ledger.bytes_moved(SENT),
            "tls": self._tls + tls,
            "kernel_sent": self._sent + sent,
            "kernel_received": self._received + received,
        }
