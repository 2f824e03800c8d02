"""A session on the socket that it has at present, without threads.

Nothing waits here, but for the last frame: all that is done at a time is bounded.
Whoever calls holds the mutex of the driver.
"""

import socket
import time
from collections.abc import Callable

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.wire import (
    frames,
    ledger,
    reconnect,
    session,
    socket_io,
    wakeups,
)
from nebula_jax.security import tls

GOODBYE_SECONDS = 5.0  # to deliver an Abort, or for the acknowledgement of our End


class Connection:
    """The socket of a session, between which it moves bytes."""

    def __init__(
        self,
        session_: session.Session,
        line: wan.Line,
        wakes: wakeups.Waker,
        *,
        receive: Callable[[frames.Message], None],
        has_room: Callable[[], bool],
        notify: Callable[[], None],
        reconnect_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        """Starts without a socket (see `Driver`); `notify` wakes callers who wait."""
        self.session = session_
        self.io: socket_io.SocketIO | None = None
        self.is_stalled = False  # True if there was no room to read more
        self.is_over = False  # True if all was sent and received
        self.has_received_end = False
        self.reconnect = reconnect.Reconnect(reconnect_timeout, session_.session_id)
        # The latest time at which nothing was in flight that the peer would have read.
        self._idle_at = 0.0
        self._receive, self._has_room = receive, has_room
        self._notify, self._log = notify, log
        self._shaper, self._waker = wan.Shaper(line), wakes
        self._traffic = ledger.Traffic(session_.ledger)
        self._next_tick = 0.0  # before both sides have sent Open: always

    @property
    def _present(self) -> socket_io.SocketIO:
        """The socket, for what is done only while there is one."""
        assert self.io is not None
        return self.io

    def adopt(self, sock: socket.socket) -> None:
        """Goes on with a new socket, on which the session has begun or resumed."""
        self.drop()
        self._traffic.opened(sock)
        self.io = socket_io.SocketIO(sock, self._shaper, self._waker)
        self._next_tick = 0.0
        self._note_recovery()
        self._note_end_of_silence()
        self._notify()  # the peer has acknowledged something
        self._waker.wake()

    def drop(self, linger: bool = False) -> None:
        """Closes the socket, if any."""
        if self.io is not None:
            self._traffic.closed(self.io.socket, self.io.tls_bytes)
            self.io.close(linger)
            self.io = None

    @property
    def traffic(self) -> dict[str, int]:
        """The bytes so far, see `ledger.Traffic.report`."""
        io = self.io
        if io is None:
            return self._traffic.report(None, 0)
        return self._traffic.report(io.socket, io.tls_bytes)

    @property
    def round_trip(self) -> float:
        """The seconds of a round trip; 0 without a connection."""
        io = self.io
        return 0.0 if io is None else ledger.round_trip(io.socket)

    def send(self, message: frames.Message, is_small: bool) -> None:
        """Queues a message; writes it if it is small and nothing is before it.

        Raises session.LocalProtocolError if the protocol does not allow it now.
        """
        io, is_first = self.io, not self.session.window.is_pending
        if self.session.window.is_empty:
            self._idle_at = time.monotonic()
        self.session.send(message)
        if is_small and is_first and io is not None and io.can_write:
            try:
                io.write(self.session, time.monotonic())
            except OSError as error:  # there may still be something to read
                io.error = error
            if self._shaper.is_transparent and io.can_write:
                return
        self._waker.wake()

    def turn(self, is_readable: bool) -> None:
        """Does what there is to do at present.

        Raises OSError, session.PeerGone, frames.Damaged if the connection has broken;
        session.PeerAborted if the peer has given up; session.RemoteProtocolError if it
        breaks the protocol.
        """
        io, now = self._present, time.monotonic()
        if self.session.window.is_empty or self.session.watch.reads_nothing:
            self._idle_at = now
        if io.error is not None:
            raise io.error
        if is_readable:
            self._read(now)
        if now >= self._next_tick:
            self._tick(now)
        io.write(self.session, now)
        if self.has_received_end and self.session.is_over and self._shaper.empty:
            self.is_over = True

    def _tick(self, now: float) -> None:
        live = self.session.liveness
        if live.is_late(now) or live.timed_out(now):
            if self.can_read():  # what came while this side was slow
                self._read(now)
            else:  # the silence is this side's own
                live.received(now)
        self.session.tick(now)
        if live.is_late(now):
            live.is_noted = True
            self._log(
                f"no sign of {self.session.peer} for {live.silence(now):.0f} s; waiting"
            )
        # What crosses from now on only makes it later, once both have sent Open.
        is_running = self.session.is_running
        self._next_tick = now + self.session.next_tick(now) if is_running else 0.0

    def sleep(self) -> float:
        """Returns the seconds until there is something to do by the clock."""
        io = self._present
        if io.has_more or io.error is not None:
            return 0.0
        now = time.monotonic()
        sleep = self._next_tick - now
        if not self._next_tick:
            sleep = min(self.session.next_tick(now), self.deadline() - now)
        if not self._shaper.is_transparent and not io.is_blocked:
            wait = self._shaper.wait(now)
            sleep = sleep if wait is None else min(sleep, wait)
        return max(0.0, sleep)

    def can_read(self) -> bool:
        """Returns True if what comes may be read."""
        # First True: who makes room after that wakes the thread.
        self.is_stalled = True
        # Before both sides have sent Open, no more than that can come.
        self.is_stalled = (
            self.session.is_paused or not self._has_room()
        ) and self.session.is_running
        return not self.is_stalled

    def _read(self, now: float) -> None:
        acknowledged = self.session.window.acknowledged
        try:
            self._present.read(self.session, now, self.can_read)
        finally:  # also what came just before the end of the stream
            self.deliver()
            if self.session.window.acknowledged != acknowledged:
                self._notify()
        if self.reconnect.is_lost:
            self._note_recovery()
        self._note_end_of_silence()

    def _note_end_of_silence(self) -> None:
        if seconds := self.session.liveness.ended():
            self._log(f"{self.session.peer} is there again, after {seconds:.1f} s")

    def deliver(self) -> None:
        """Hands over messages that came; raises session.PeerAborted at an Abort."""
        events = self.session.events()
        for message in events:
            if type(message) is frames.Abort:
                if self.has_received_end:  # and left: it has forgotten the session
                    self.is_over = True
                    return
                raise session.PeerAborted(
                    f"{self.session.peer} gave up: {message.reason}"
                )
            self._receive(message)
            if type(message) is frames.End:
                self.has_received_end = True
        # Now: waking takes as long as what is left to do before the GIL is free.
        if events:
            self._notify()

    def lose(self, error: Exception) -> None:
        """Closes a broken connection; raises errors.NebulaError if that is the end."""
        io = self._present
        if not isinstance(error, frames.Damaged):  # else nothing more can be read
            try:
                io.has_unread = True
                while io.has_unread and self.can_read():
                    self._read(time.monotonic())
            except (OSError, session.PeerGone):
                pass
            except frames.Damaged as damage:  # why the peer has left, perhaps
                error = damage
        self.drop()
        self.session.lost()
        loss, crossed = as_error(error, self.session.peer), self.session.crossed
        now = time.monotonic()
        is_first = self.reconnect.lost(now, str(loss), crossed, self._idle_at)
        if is_first and self.reconnect.timeout and not self.has_received_end:
            self._log(f"{loss}; waiting for it to come back")

    def _note_recovery(self) -> None:
        """Records that the connection is back, once both sides have sent Open."""
        if self.reconnect.is_lost and self.session.is_running:
            away = self.reconnect.recovered(time.monotonic())
            if not self.has_received_end:
                self._log(
                    f"the connection to {self.session.peer} is back after {away:.1f} s"
                )

    def deadline(self) -> float:
        """Returns the time at which a session without a connection is given up."""
        if not self.reconnect.is_lost:
            return float("inf")
        # What remains may be but a courtesy to a peer that has gone.
        is_courtesy = self.session.owes_only_end
        return self.reconnect.deadline(GOODBYE_SECONDS if is_courtesy else float("inf"))

    def send_final(self, reason: str) -> None:
        """Sends an Abort, if there is a connection; waits a while for it to leave."""
        if self.io is not None:
            buffers = self.session.abort(reason, time.monotonic())
            self.io.send_final(buffers, GOODBYE_SECONDS)


def as_error(error: Exception, peer: str) -> errors.NebulaError:
    """Returns an error that names the peer."""
    if isinstance(error, errors.NebulaError):
        return error
    return session.PeerGone(f"lost the connection to {peer}: {tls.in_words(error)}")
