"""Keeps a session moving, over whatever connection it has at present.

One thread reads, keeps time and redials. A caller who sends something small writes it
itself; the rest is left to the thread. The one who holds the mutex moves bytes, and
never waits meanwhile. A caller who waits for the peer sleeps until a whole message has
come, or an acknowledgement (see `wakeups`).
"""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.wire import (
    connection,
    frames,
    greeting,
    session,
    socket_io,
    wakeups,
)
from nebula_jax.security import tls

INLINE_BYTES = 1 << 16  # a message up to this size is written by the one who sends it
LONGEST_SLEEP = 3600.0  # seconds: polls refuse a few weeks


class LineFailed(errors.NebulaError):
    """A failure of this process in the work of a line, such as of its memory."""


REPORTED = (session.RemoteProtocolError, LineFailed)
"""The errors that the peer is sent: those of the line itself it finds out."""


class Driver:
    """The moving part of a link."""

    def __init__(
        self,
        session_: session.Session,
        line: wan.Line,
        *,
        receive: Callable[[frames.Message], None],
        has_room: Callable[[], bool],
        dial: Callable[[float], greeting.Connected] | None,
        reconnect_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        """Makes a driver without a socket.

        `receive` is called with each message that comes, and must not wait; `has_room`
        returns True if more may be read; the connector's `dial` makes a new connection
        by a monotonic time, or raises NebulaError or OSError. The session may be
        without a connection for `reconnect_timeout` seconds.
        """
        self.is_dead = False  # True if nothing moves any more
        self._session, self._dial, self._has_room = session_, dial, has_room
        self._waker, self._waiters = wakeups.Waker(), wakeups.Waiters()
        self.connection = connection.Connection(
            session_,
            line,
            self._waker,
            receive=receive,
            has_room=has_room,
            notify=self._waiters.notify,
            reconnect_timeout=reconnect_timeout,
            log=log,
        )
        self._mutex = threading.Lock()  # guards the session and the connection
        self._error: Exception | None = None
        self._abort_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._has_started = False

    # For the link, by any thread.

    def start(self, sock: socket.socket) -> None:
        """Takes the connection on which the peer's Hello came."""
        with self._mutex:
            self._adopt(sock)
            try:
                self.connection.deliver()  # what came with the peer's Hello
            except errors.NebulaError as error:
                self._fail(error)

    def attach(
        self, connected: greeting.Connected, opening: frames.Open, acknowledged: int
    ) -> None:
        """Takes a connection on which the peer has come, or come back (listener only).

        Raises session.SessionOver with the reason; session.RemoteProtocolError if it is
        no connection to go on with: the present one, if any, stays.
        """
        self._check_alive()  # before the mutex, with which an ending session lingers
        with self._mutex:
            self._check_alive()
            now = time.monotonic()
            self._session.resume(opening, acknowledged, now, connected.tags)
            self._adopt(connected.sock)

    def _check_alive(self) -> None:
        if self.is_dead or self._abort_reason is not None:
            raise session.SessionOver(
                str(self._abort_reason or self._error or "the session has ended")
            )

    def _adopt(self, sock: socket.socket) -> None:
        self.connection.adopt(sock)
        if not self._has_started:
            self._thread.start()  # raises RuntimeError if the system has no more
            self._has_started = True

    def give_up(self, reason: str, may_return: bool = False) -> None:
        """Ends the session: its peer cannot come back, or, if it may, does not."""
        if may_return:
            self.connection.reconnect.failed(reason)
            return
        self._fail(session.PeerGone(reason))
        self._waker.wake()

    @property
    def is_away(self) -> bool:
        """True if the session is over, or has no connection at present."""
        return self.is_dead or self.connection.io is None

    @property
    def was_lost(self) -> bool:
        """True if the session ended because the peer did not come back."""
        return isinstance(self._error, session.PeerGone)

    def check(self) -> None:
        """Raises what has ended the session, if it was an error."""
        if self._error is not None:
            raise self._error

    def enqueue(self, message: frames.Message, nbytes: int = 0) -> None:
        """Sends a message, or leaves it to the thread; never waits for the peer.

        Raises session.SessionOver, or what ended the session, if nothing can be sent
        any more; session.LocalProtocolError if the protocol does not allow it now.
        """
        if self.is_dead:
            self.check()
            peer = self._session.peer
            raise session.SessionOver(f"the session with {peer} has ended")
        with self._mutex:
            self.connection.send(message, is_small=nbytes <= INLINE_BYTES)

    def channels_ready(self) -> None:
        """Admits what follows the Welcome: channels are added (connector only)."""
        with self._mutex:
            try:
                try:
                    self._session.channels_ready()
                finally:
                    self.connection.deliver()
            except frames.Damaged as error:
                self.connection.lose(error)
            except Exception as error:
                self._fail(error)
        self._waker.wake()
        self.check()

    def notify_space(self) -> None:
        """Makes the thread call `has_room` again: there may be more room."""
        if self.connection.is_stalled:
            self._waker.wake()

    def wait(
        self,
        predicate: Callable[[], Any],
        timeout: float | None = None,
        past_end: bool = False,
    ) -> bool:
        """Waits until `predicate` holds, made true by a message or an acknowledgement.

        Returns True if it does. It may not after `timeout` seconds, or when the session
        or, unless `past_end`, what the peer had to send has ended, or when there is no
        room to read more.
        """
        self.notify_space()

        def is_done() -> bool:
            has_ended = self.connection.has_received_end and not past_end
            return predicate() or self.is_dead or has_ended or not self._has_room()

        self._waiters.wait(is_done, timeout)
        return bool(predicate())  # it may hold since just before the end

    def abort(self, reason: str) -> None:
        """Ends the session, and sends the reason if the peer can be reached."""
        self._abort_reason = reason
        if self._has_started:
            self._waker.wake()
            longest = connection.GOODBYE_SECONDS + socket_io.LINGER_SECONDS
            self._thread.join(longest)
        else:
            self._finish()

    def join(self) -> None:
        """Waits for the thread to have ended."""
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        is_readable, lost = False, self.connection.reconnect
        try:
            while not self.is_dead:
                if self._abort_reason is not None:
                    with self._mutex:
                        self.connection.send_final(self._abort_reason)
                        self.is_dead = True
                elif lost.is_lost and time.monotonic() >= self.connection.deadline():
                    if self._session.owes_only_end:
                        self.is_dead = True
                    else:
                        self._fail(session.PeerGone(lost.explanation))
                elif self.connection.io is None:
                    self._redial()
                else:
                    is_readable = self._turn(is_readable)
        except Exception as error:  # whatever it is, callers who wait must get it
            self._fail(error)
        finally:
            self._finish()

    def _turn(self, is_readable: bool) -> bool:
        """Does what there is to do, and waits; returns True if bytes may be read."""
        current = self.connection
        with self._mutex:
            io = current.io
            if io is None:
                return False
            try:
                current.turn(is_readable)
            except (OSError, session.PeerGone, frames.Damaged) as error:
                current.lose(error)
            reads = current.can_read()
            if current.is_over:
                self.is_dead = True
            if current.is_over or current.io is None:
                return False
            io.watch(reads)
            sleep = min(current.sleep(), LONGEST_SLEEP)
        return io.wait(sleep)

    def _redial(self) -> None:
        """Makes one attempt at a new connection, after a pause that grows."""
        if self._dial is None:
            self._pause(LONGEST_SLEEP)  # until one is attached
            return
        policy = self.connection.reconnect
        self._pause(policy.next_pause())
        if self._is_ending:
            return
        try:
            connected = self._dial(self.connection.deadline())
        except errors.PeerLost as error:
            self._fail(session.PeerGone(str(error)))
            return
        except (errors.NebulaError, OSError) as error:
            policy.failed(tls.in_words(error))
            return
        with self._mutex:
            self._session.begin(time.monotonic(), connected.tags)
            self._adopt(connected.sock)

    @property
    def _is_ending(self) -> bool:
        """True if no connection is of any use: another thread has ended the session."""
        return self.is_dead or self._abort_reason is not None

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.connection.io is None and not self._is_ending:
            left = min(until, self.connection.deadline()) - time.monotonic()
            if left <= 0:
                return
            self._waker.wait(left)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, errors.NebulaError):  # not of a socket: `_turn`
            what = f"{type(error).__name__}: {error}"
            error = LineFailed(f"the line to {self._session.peer}: {what}")
        self._error = self._error or error
        self.is_dead = True

    def _finish(self) -> None:
        """Sends the peer the error that this side ends with; frees everything."""
        self.is_dead = True
        self._waiters.notify()  # nobody needs to wait for what follows
        with self._mutex:
            try:
                if isinstance(self._error, REPORTED):
                    self.connection.send_final(str(self._error))
            finally:
                self.connection.drop(linger=True)
                self._session.window.drop()
                self._waker.close()
