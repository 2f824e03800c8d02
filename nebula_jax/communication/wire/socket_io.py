"""One connection's bytes: out through the emulated line, in to their buffers."""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from nebula_jax.communication import wan
from nebula_jax.communication.wire import ledger, receive_buffer, wakeups
from nebula_jax.communication.wire import session as session_lib

# Bytes per call: as much as a socket's buffer holds, so that a turn ends soon.
CHUNK_BYTES = 1 << 22
WORTH_WAKING = 1 << 19  # bytes of a large tensor: a slow line brings them by the packet
TURN_SECONDS = 0.02  # of reading or writing, before others get the mutex
TLS_RECORD = 17 << 10  # bytes, at most, with all that is around them
LINGER_SECONDS = 1.0  # for the peer to read the last frame before the socket is gone

POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketIO:
    """A connected socket that never waits, except in `wait` and for the last frame."""

    def __init__(
        self, sock: socket.socket, shaper: wan.Shaper, wakes: wakeups.Waker
    ) -> None:
        """Takes over a connected socket, TLS or not; `wakes` ends `wait`."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.is_blocked = False  # True if the socket takes no more at present
        self.has_more = False  # True if there was no time to write all
        self.has_unread = True  # where no poll sees it: TLS may have read ahead
        self.error: OSError | None = None  # of a write, for the thread that reads
        self.tls_bytes = 0  # bytes that TLS has added to what was written
        self._tls: Any = sock if isinstance(sock, ssl.SSLSocket) else None
        """The socket if it is TLS. Any: typeshed's `read` takes no memoryview."""
        self._shaper, self._waker = shaper, wakes
        self._low_water = 1
        self._fd, self._polled, self._reads = sock.fileno(), 0, False
        self._poller = select.poll()
        self._poller.register(wakes, POLLIN)

    @property
    def can_write(self) -> bool:
        """True if the socket takes bytes, unless a poll shows otherwise."""
        return not self.is_blocked and self.error is None

    def watch(self, reads: bool) -> None:
        """Has `wait` wait for bytes if `reads`, and for room to write if it lacked."""
        self._reads = reads
        events = (POLLIN if reads else 0) | (POLLOUT if self.is_blocked else 0)
        if events == self._polled:
            return
        if not events:  # else the end of the connection would wake for ever
            self._poller.unregister(self._fd)
        else:
            self._poller.register(self._fd, events)
        self._polled = events

    def wait(self, seconds: float) -> bool:
        """Waits for something to do; True if bytes, or their end, may be read."""
        is_readable = self._reads and self.has_unread
        for fd, happened in self._poller.poll(0 if is_readable else 1000 * seconds):
            if fd != self._fd:
                self._waker.clear()
            elif happened & ~POLLOUT:  # its end is reported in any case
                is_readable = self._reads
        return is_readable

    def write(self, session: session_lib.Session, now: float) -> None:
        """Writes what the session has to send and the line lets through by now."""
        self.is_blocked = self.has_more = False
        shaper = self._shaper
        while shaper.is_transparent:
            buffers = session.data_to_send(now)
            if not buffers:
                return
            if len(buffers) == 1:  # small, and mostly gone at once
                count = self._send(buffers[0])
                if count == len(buffers[0]):
                    continue
                buffers = [memoryview(buffers[0])[count:]]
            for buffer in buffers:
                shaper.put(buffer, now)
        deadline = now + TURN_SECONDS
        while not self.is_blocked and not self.has_more:
            view = shaper.due(now)
            if view is not None:
                shaper.wrote(self._send(view[:CHUNK_BYTES]))
                self.has_more = time.monotonic() > deadline
            elif not shaper.ready(now):
                return
            elif buffers := session.data_to_send(now):
                for buffer in buffers:
                    shaper.put(buffer, now)
            else:
                return

    def _send(self, view: bytes | memoryview) -> int:
        try:
            count = self.socket.send(view) if len(view) else 0
            if self._tls is not None:
                self.tls_bytes += ledger.tls_bytes(count)
            return count
        except BLOCKED:
            self.is_blocked = True
            return 0

    def read(
        self, session: session_lib.Session, now: float, wants: Callable[[], bool]
    ) -> None:
        """Reads what is there, while it is wanted.

        `has_unread` is then True if there may be more: TLS hands out a record at a
        time, and may keep others where no poll sees them. Raises session.PeerGone if
        the peer has closed the connection; session.RemoteProtocolError if it breaks the
        protocol.
        """
        self.has_unread = True
        deadline = now + TURN_SECONDS
        while True:
            view = session.buffer.get_buffer()[:CHUNK_BYTES]
            count, is_dry = self._fill(view, session)
            if count:
                session.receive(count, now)
            elif not is_dry:
                raise session_lib.PeerGone(
                    f"{session.peer} closed the connection without a goodbye"
                )
            is_short = count < len(view)  # of plain bytes, another read finds nothing
            waits = self._tls and (session.buffer.has_holes or self._tls.pending())
            if is_dry or (is_short and not waits):
                if session.buffer.has_holes or self._low_water > 1:
                    self._set_low_water(session.buffer)
                self.has_unread = False
                return
            now = time.monotonic()
            if now > deadline or session.has_events or not wants():
                return

    def _set_low_water(self, buffer: receive_buffer.ReceiveBuffer) -> None:
        """Lets the system wake us for a good part of a large tensor, or the end."""
        left = len(buffer.get_buffer()) if buffer.has_holes else 1
        if self._tls is not None:
            left -= TLS_RECORD  # OpenSSL may have taken in the start of one
        count = max(1, min(left, WORTH_WAKING))
        if count != self._low_water:
            with contextlib.suppress(OSError):  # not every kind of socket can
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    def _fill(self, view: memoryview, session: session_lib.Session) -> tuple[int, bool]:
        """Reads into a buffer; TLS hands out a record of at most 16 KiB at a time.

        Returns the number of bytes, and True if there are no more at present. No bytes
        although there are more mean that the stream has ended.
        """
        filled, goes_on = 0, True
        try:
            if self._tls is None:
                return self.socket.recv_into(view), False
            while goes_on:  # `read` is what recv_into comes to, a call less
                count = self._tls.read(len(view) - filled, view[filled:])
                filled += count
                goes_on = session.buffer.has_holes and count and filled < len(view)
        except BLOCKED:
            return filled, True
        return filled, False

    def send_final(self, buffers: list, seconds: float) -> None:
        """Writes behind what is in flight, waiting: a frame is never cut by another."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            for buffer in buffers:
                self._shaper.put(buffer, time.monotonic())
            while (view := self._shaper.due(float("inf"))) is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    return
                self.socket.settimeout(left)
                self._shaper.wrote(self.socket.send(view) if len(view) else 0)

    def close(self, linger: bool = False) -> None:
        """Closes the socket; with `linger`, after the peer has read the last frame.

        Bytes that are unread here would reset it away.
        """
        with contextlib.suppress(OSError, ValueError):
            if linger:
                self.socket.shutdown(socket.SHUT_WR)
                self.socket.settimeout(LINGER_SECONDS)
                deadline = time.monotonic() + LINGER_SECONDS
                while self.socket.recv(1 << 16) and time.monotonic() < deadline:
                    pass
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends a poll of it
        self.socket.close()
        self._shaper.clear()
