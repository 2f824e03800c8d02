"""One connection's bytes: out through the emulated line, in to where they belong."""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable

from nebula_jax.communication import wan
from nebula_jax.communication.wire import session

CHUNK_BYTES = (
    1 << 22
)  # per call: a socket's buffer; a turn still ends within milliseconds
WORTH_WAKING = 1 << 18  # bytes of a large tensor: a slow line brings them by the packet
TURN_SECONDS = 0.05  # of reading or writing before the other gets its turn
TLS_RECORD = 17 << 10  # bytes, at most, with all that is around them
# An answer to something small often comes within this time, and being woken would take
# as long again.
AWAKE_SECONDS = 100e-6
MOST_NAPS = 63
LINGER_SECONDS = 1.0  # for the peer to read our last words before the socket is gone

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Pipe:
    """A connected socket that never waits, except in `wait` and to say goodbye."""

    def __init__(self, sock: socket.socket, shaper: wan.Shaper, wakes: socket.socket):
        """Takes over a socket.

        Args:
          sock: connected, TLS or not.
          shaper: the line; it outlives connections.
          wakes: ends `wait` when it can be read.
        """
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.is_blocked = False
        """Whether the socket takes no more at present."""
        self.has_more = False
        """Whether there was no time to write all."""
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._shaper = shaper
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._poller.register(wakes, select.POLLIN)
        self._polls_out = False
        self._naps = self._last_naps = 0  # waits that sleep at once
        self._low_water = 1
        self._fd = sock.fileno()

    def wait(self, seconds: float, awake: bool = False) -> bool:
        """Waits for bytes, or for room to write if it lacked any.

        Args:
          seconds: at most.
          awake: whether to look for a moment before going to sleep.

        Returns:
          Whether it was woken.
        """
        if self.is_blocked != self._polls_out:
            self._polls_out = self.is_blocked
            events = select.POLLIN | (select.POLLOUT if self.is_blocked else 0)
            self._poller.modify(self._fd, events)
        ready = self._look(seconds) if awake else ()
        if not ready:
            ready = self._poller.poll(1000 * seconds)
        return len(ready) > 1 or (len(ready) == 1 and ready[0][0] != self._fd)

    def _look(self, seconds: float) -> list[tuple[int, int]]:
        """Looks for bytes without sleeping; less often where that was in vain before.

        Where both ends share a core, the answer cannot come while we look.
        """
        if self._naps:
            self._naps -= 1
            return []
        give_up = time.monotonic() + min(seconds, AWAKE_SECONDS)
        while not (ready := self._poller.poll(0)):
            if time.monotonic() > give_up:
                self._last_naps = self._naps = min(2 * self._last_naps + 1, MOST_NAPS)
                return ready
        self._last_naps = 0
        return ready

    def write(self, connection: session.Connection, now: float) -> None:
        """Writes what the connection has to say and the line lets through by now."""
        self.is_blocked = self.has_more = False
        shaper, deadline = self._shaper, now + TURN_SECONDS
        while shaper.is_transparent:
            buffers = connection.data_to_send(now)
            if not buffers:
                return
            if len(buffers) == 1:  # small, and mostly gone at once
                count = self._send(memoryview(buffers[0]))
                if count == len(buffers[0]):
                    continue
                buffers = [memoryview(buffers[0])[count:]]
            for buffer in buffers:
                shaper.put(buffer, now)
        while not self.is_blocked and not self.has_more:
            view = shaper.due(now)
            if view is not None:
                shaper.wrote(self._send(view[:CHUNK_BYTES]))
                self.has_more = time.monotonic() > deadline
            elif not shaper.ready(now):
                return
            elif buffers := connection.data_to_send(now):
                for buffer in buffers:
                    shaper.put(buffer, now)
            else:
                return

    def _send(self, view: memoryview) -> int:
        try:
            return self.socket.send(view) if len(view) else 0
        except BLOCKED:
            self.is_blocked = True
            return 0

    def read(self, connection: session.Connection, wants: Callable[[], bool]) -> bool:
        """Reads what is there, while it is wanted, as it must be at first.

        Returns:
          Whether there may be more, perhaps where no selector sees it: TLS hands out a
          record at a time.

        Raises:
          protocol.PeerGone: if the peer has closed the connection.
          protocol.RemoteProtocolError: if it breaks the protocol.
        """
        deadline = None
        while True:
            view = connection.get_buffer()[:CHUNK_BYTES]
            count, is_dry = self._fill(view, connection.is_inside_tensor)
            if is_dry and not count:
                self._wake_for(connection)
                return False
            now = time.monotonic()
            if count == 0:
                raise session.PeerGone(
                    f"{connection.peer} closed the connection without a goodbye"
                )
            connection.buffer_updated(count, now)
            if is_dry or (count < len(view) and self._is_drained(connection)):
                self._wake_for(connection)
                return False
            deadline = deadline or now + TURN_SECONDS
            if now > deadline or connection.has_events or not wants():
                return True

    def _wake_for(self, connection: session.Connection) -> None:
        """Lets the system wake us for a good part of a large tensor, or the end."""
        left = len(connection.get_buffer()) if connection.is_inside_tensor else 1
        if self._is_tls:
            left -= TLS_RECORD  # OpenSSL may have taken in the start of one
        count = max(1, min(left, WORTH_WAKING))
        if count != self._low_water:
            with contextlib.suppress(OSError):  # not every kind of socket can
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    def _fill(self, view: memoryview, is_large: bool) -> tuple[int, bool]:
        """Reads into a buffer; TLS hands out a record of at most 16 KiB at a time.

        Returns:
          How many bytes, and whether there are no more at present. No bytes although
          there are more means that the stream has ended.
        """
        filled, goes_on = 0, True
        try:
            while goes_on:
                if self._is_tls:  # what recv_into comes to, a call less for each record
                    count = self.socket.read(len(view) - filled, view[filled:])
                else:
                    count = self.socket.recv_into(view)
                filled += count
                goes_on = self._is_tls and is_large and count and filled < len(view)
        except BLOCKED:
            return filled, True
        return filled, False

    def _is_drained(self, connection: session.Connection) -> bool:
        """After a short read: whether another one would surely find nothing."""
        if not self._is_tls:
            return True
        return not connection.is_inside_tensor and not self.socket.pending()

    def say_at_last(self, buffers: list, seconds: float) -> None:
        """Writes behind what is under way, waiting: a frame is never cut by another."""
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
        """Closes the socket.

        Args:
          linger: first lets the peer read our last words: bytes that are unread here
            would reset them away.
        """
        with contextlib.suppress(OSError, ValueError):
            if linger:
                self.socket.shutdown(socket.SHUT_WR)
                self.socket.settimeout(LINGER_SECONDS)
                deadline = time.monotonic() + LINGER_SECONDS
                while self.socket.recv(1 << 16) and time.monotonic() < deadline:
                    pass
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a caller who reads it
        self.socket.close()
        self._shaper.clear()
