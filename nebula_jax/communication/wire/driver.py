"""Keeps a session moving, over whatever connection it has at present.

Whoever holds `_io` moves bytes, and never waits meanwhile. A thread of its own does it
beside the computation. A caller who waits for the peer reads the socket itself, and
one who says something small writes it itself: handing over to a thread would double a
round trip. All that is done at a time is bounded, so that nothing starves.

When a connection breaks, the connector's thread dials again with growing pauses, and
the listener's waits for a new socket to be handed to `attach`.
"""

import collections
import contextlib
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.wire import frames, session, socket_io

INLINE_BYTES = 1 << 16  # a message up to this size is written by the one who says it
GOODBYE_SECONDS = 5.0  # to deliver an Abort, or to hear that our End has come
LONGEST_SLEEP = 3600.0  # seconds: selectors refuse a few weeks
RECHECK_SECONDS = 0.1  # a waiter who cannot read looks again this often
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to dial again
# After a caller has read, the thread stays away from the socket for this long: the
# caller is likely to be back before the answer. The thread looks at first as often.
STAY_SECONDS, LONGEST_STAY = 0.002, 0.064


class Pump:
    """The moving part of a link."""

    def __init__(
        self,
        connection: session.Connection,
        line: wan.Line,
        *,
        receive: Callable[[frames.Message], None],
        has_room: Callable[[], bool],
        dial: Callable[[], socket.socket] | None,
        reconnect_timeout: float,
        log: Callable[[str], None],
    ):
        """Makes a pump without a socket.

        Args:
          connection: the session.
          line: what to emulate for all that leaves.
          receive: called with each message that comes, by whoever reads; must not wait.
          has_room: whether more may be read.
          dial: connector: makes a new connection; raises NebulaError or OSError.
          reconnect_timeout: seconds that the session may be without a connection.
          log: told about connections that break and come back.
        """
        self.connection = connection
        self._receive, self._has_room = receive, has_room
        self._dial, self._reconnect_timeout, self._log = dial, reconnect_timeout, log
        self._shaper = wan.Shaper(line)
        self._outbox: collections.deque[frames.Message] = collections.deque()
        self.is_dead = False
        """Whether nothing moves any more."""
        self._has_heard_all = False  # the peer's End was handed to `receive`
        self._error: Exception | None = None
        self._last_words: str | None = None
        self._changed = threading.Condition()
        self._waiters = 0  # callers asleep on `_changed`
        self._io = threading.Lock()  # guards the connection and the pipe
        self._pipe: socket_io.Pipe | None = None
        # The caller who reads, and the thread that gives way to it.
        self._reading = threading.Lock()
        self._has_reader = False
        self._is_stalled = False  # there is no room to read more
        self._is_unread = False  # there was no time to read more
        self._has_asked = False  # something small was said, and nothing read since
        self._visits = self._visits_seen = 0  # of callers who read
        self._stay = 0.0  # seconds until the thread looks for them; 0 if it reads
        # The thread.
        self._selector = selectors.DefaultSelector()
        self._watched = 0  # events of the socket that the selector wakes for
        self._wakes_at = 0.0  # when the thread will look again by itself
        self._wake_in, self._wake_out = _pair()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._reader_in, self._reader_out = _pair()
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._has_started = False
        # A connection that broke.
        self._lost_at: float | None = None  # None while there is one
        self._loss = self._why = ""  # how it was lost; why it does not come back
        self._backoff = 0.0  # seconds until dialling again
        self._jitter = random.Random(connection.session)

    # What a link uses.

    def start(self, sock: socket.socket) -> None:
        """Connector: begins the session on a connected socket."""
        with self._io:
            self._adopt(sock)
            self.connection.begin(time.monotonic())
            self._turn(reads=False)
            self._watch()
            self._has_started = True
            self._thread.start()

    def attach(self, sock: socket.socket, opening: frames.Open, taken: int) -> None:
        """Listener: the peer has come (again), on this socket.

        Raises:
          protocol.SessionOver: saying why.
          protocol.RemoteProtocolError: if this is no connection to go on with; the
            present one, if any, stays.
        """
        with self._io:
            if self.is_dead or self._last_words is not None:
                raise session.SessionOver(
                    str(self._last_words or self._error or "the session has ended")
                )
            self.connection.resume(opening, taken, time.monotonic())
            self._adopt(sock)
            self._note_recovery()
            self._turn(reads=False)
            self._watch()
            if not self._has_started:
                self._has_started = True
                self._thread.start()
        self._wake()
        self._notify()

    @property
    def has_window(self) -> bool:
        """Whether one more tensor may be said at present."""
        return not self._outbox and self.connection.has_window

    def check(self) -> None:
        """Raises what has ended the session, if it was an error."""
        if self._error is not None:
            raise self._error

    def say(self, message: frames.Message, nbytes: int = 0) -> None:
        """Queues a message; never waits.

        Args:
          message: what to say.
          nbytes: of its payload; a large one is written by the thread.
        """
        if self.is_dead:
            self.check()
            raise session.SessionOver(
                f"the session with {self.connection.peer} has ended"
            )
        self._outbox.append(message)
        is_small = nbytes <= INLINE_BYTES
        if self._io.acquire(blocking=False):
            try:
                self._turn(reads=False, writes=is_small)
                self._has_asked = is_small
            finally:
                self._io.release()
            if self._error is not None:
                raise self._error
            if is_small:
                return
        self._wake()

    def all_planned(self) -> None:
        """Connector: all channels are added, what follows the Welcome may be read."""
        with self._io:
            try:
                self.connection.all_planned()
                self._deliver(self.connection.events())
            except Exception as error:  # as in a turn
                self._fail(error)
        self.check()
        self._wake()

    def room_was_made(self) -> None:
        """To be called when something was taken that `receive` had been given."""
        if self._is_stalled:
            self._wake()

    def wait(
        self,
        predicate: Callable[[], Any],
        timeout: float | None = None,
        past_end: bool = False,
    ) -> bool:
        """Waits until `predicate` holds, reading meanwhile.

        Args:
          predicate: made true by a message that comes, or by one that is taken.
          timeout: seconds.
          past_end: whether to go on when the peer has said all.

        Returns:
          Whether it holds. It may not after the timeout, or when the session or what
          the peer had to say has ended, or when there is no room to read more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not predicate():
            if self.is_dead or (self._has_heard_all and not past_end):
                break
            remaining = RECHECK_SECONDS
            if deadline is not None:
                remaining = min(remaining, deadline - time.monotonic())
            if remaining <= 0 or not self._has_room():
                break
            can_read = self._pipe is not None and self._wants_to_read()
            if can_read and self._reading.acquire(blocking=False):
                try:
                    self._read_until(predicate, deadline, past_end)
                finally:
                    self._reading.release()
                    self._notify()
            else:
                with self._changed:
                    self._waiters += 1
                    if not predicate() and not self.is_dead:
                        self._changed.wait(remaining)
                    self._waiters -= 1
        return bool(predicate())

    def abort(self, reason: str) -> None:
        """Ends the session; the peer is told why, if it can be reached."""
        self._last_words = reason
        self._wake()
        self._notify()
        if self._has_started:
            self._thread.join(GOODBYE_SECONDS + socket_io.LINGER_SECONDS)
        else:
            self._finish()

    def join(self) -> None:
        """Waits for the thread to have ended."""
        self._thread.join()

    # Moving bytes; `_io` is held.

    def _turn(self, reads: bool, writes: bool = True, ticks: bool = False) -> None:
        """Moves what can be moved without waiting.

        Args:
          reads: what comes in.
          writes: what goes out.
          ticks: also looks at the clock, as the thread does.
        """
        if self.is_dead:
            return
        connection, current = self.connection, self._pipe
        try:
            while self._outbox:
                connection.send(self._outbox.popleft())
                if ticks and self._has_reader:
                    self._wake_reader()  # who may wait for the window
            if current is None:
                return
            now = time.monotonic()
            if reads or (ticks and connection.is_silent(now)):
                self._read(now)
            if ticks:
                connection.tick(now)
            if writes and (connection.wants_to_write or not self._shaper.empty):
                current.write(connection, now)
                if not self._shaper.empty or current.has_more:
                    self._watch()
                    self._nudge()
            if connection.is_over and self._shaper.empty and not self._outbox:
                self._end()
        except (OSError, session.PeerGone) as error:
            self._lose(error)
        except Exception as error:  # whatever it is, who waits must hear of it
            self._fail(error)
        if ticks:
            self._watch()
            if current is not None and current.is_blocked and self._has_reader:
                self._wake_reader()  # it shall wait for room as well
        if self._waiters:
            self._notify()

    def _read(self, now: float) -> None:
        self._is_stalled = not self._wants_to_read()
        if self._is_stalled:
            self.connection.not_reading(now)
            return
        try:
            self._is_unread = self._pipe.read(self.connection, self._wants_to_read)
        finally:  # also what came just before the end of the stream
            if self.connection.has_events:
                self._deliver(self.connection.events())
        if self._lost_at is not None:
            self._note_recovery()

    def _deliver(self, messages: list[frames.Message]) -> None:
        for message in messages:
            if type(message) is frames.Abort:
                if self._has_heard_all:  # and left: it has forgotten the session
                    self._end()
                    return
                raise session.PeerAborted(
                    f"{self.connection.peer} gave up: {message.reason}"
                )
            self._receive(message)
            if type(message) is frames.End:
                self._has_heard_all = True

    def _hear_out(self) -> None:
        """What had come before the connection broke: the peer's last words, perhaps."""
        with contextlib.suppress(OSError, session.PeerGone):
            self._is_unread = True
            while self._is_unread and self._pipe is not None and self._wants_to_read():
                self._read(time.monotonic())

    def _wants_to_read(self) -> bool:
        if not self.connection.is_running:
            return True  # what must come first is an Open
        return not self.connection.is_paused and self._has_room()

    def _watch(self) -> None:
        """Tells the thread's selector what to wake for; it may be asleep in it."""
        if self._pipe is None:
            return
        events = 0
        if self._pipe.is_blocked and not self._has_reader:
            events = selectors.EVENT_WRITE
        if not self._stay:
            self._is_stalled = not self._wants_to_read()
            events |= 0 if self._is_stalled else selectors.EVENT_READ
        if events == self._watched:
            return
        if not self._watched:
            self._selector.register(self._pipe.socket, events)
        elif not events:
            self._selector.unregister(self._pipe.socket)
        else:
            self._selector.modify(self._pipe.socket, events)
        self._watched = events

    def _nudge(self) -> None:
        """Wakes the thread if there is something for it before it will look again."""
        now = time.monotonic()
        wait = 0.0 if self._pipe.has_more else self._shaper.wait(now) or 0.0
        if not self._pipe.is_blocked and now + wait < self._wakes_at:
            self._wake()

    # The caller who waits.

    def _read_until(
        self, predicate: Callable[[], Any], deadline: float | None, past_end: bool
    ) -> None:
        with self._io:
            # Bytes may wait where no poll can see them.
            reads_first = self._is_stalled or self._is_unread
            self._has_reader, self._is_stalled = True, False
            self._visits += 1
            if is_new := not self._stay:
                self._stay = STAY_SECONDS
                self._watch()
        if is_new:
            self._wake()
        try:
            # The thread may have read what makes the predicate true until just now.
            while not predicate():
                if self.is_dead or (current := self._pipe) is None:
                    return
                if reads_first or self._is_unread:
                    reads_first = False
                else:
                    sleep = LONGEST_SLEEP
                    if deadline is not None:
                        sleep = max(0.0, deadline - time.monotonic())
                    if current.wait(sleep, awake=self._has_asked):
                        _drain(self._reader_in)
                    self._has_asked = False
                with self._io:
                    if self._pipe is current:
                        self._turn(reads=True)
                if self._is_stalled:
                    return
                if self._has_heard_all and not past_end:
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    return
        finally:
            self._has_reader = False
            if (current := self._pipe) is not None and current.is_blocked:
                with self._io:
                    self._watch()
            if self._wakes_at > time.monotonic() + STAY_SECONDS:
                self._wake()

    def _look_for_reader(self) -> None:
        """The thread reads again once no caller has done so for a while."""
        if self._visits != self._visits_seen:
            self._visits_seen, self._stay = self._visits, STAY_SECONDS
        elif self._has_reader:
            self._stay = min(2 * self._stay, LONGEST_STAY)
        else:
            self._stay = 0.0

    # The thread.

    def _run(self) -> None:
        try:
            while not self.is_dead:
                if self._last_words is not None:
                    with self._io:
                        self._say_at_last(self._last_words)
                        self._end()
                elif time.monotonic() >= self._deadline():
                    self._give_up()
                elif self._pipe is None:
                    self._reconnect()
                else:
                    with self._io:
                        sleep = self._sleep()
                    has_come = False
                    for key, events in self._selector.select(sleep):
                        if key.fileobj is self._wake_in:
                            _drain(self._wake_in)
                        elif events & selectors.EVENT_READ:
                            has_come = True
                    with self._io:
                        if self._stay:
                            self._look_for_reader()
                        reads = not self._stay and (has_come or self._is_unread)
                        self._turn(reads, ticks=True)
        except Exception as error:  # whatever it is, who waits must hear of it
            self._fail(error)
        finally:
            with self._io:
                self._end()
                if isinstance(self._error, session.RemoteProtocolError):
                    self._say_at_last(str(self._error))
                self._discard_pipe(linger=True)
            self._finish()
            self._notify()

    def _finish(self) -> None:
        """Frees what the thread and callers who read used."""
        self._end()
        with self._reading, self._io:  # a caller who reads has been woken, and leaves
            self._selector.close()
            for sock in (self._wake_in, self._wake_out):
                sock.close()
            for sock in (self._reader_in, self._reader_out):
                sock.close()

    def _sleep(self) -> float:
        """Seconds until there is something to do without anybody's doing."""
        now = time.monotonic()
        is_unread = self._is_unread and not (self._stay or self._is_stalled)
        if self._pipe is None or self._pipe.has_more or self._outbox or is_unread:
            return 0.0
        sleep = min(LONGEST_SLEEP, self.connection.next_tick(now))
        if not self._pipe.is_blocked and (wait := self._shaper.wait(now)) is not None:
            sleep = min(sleep, wait)
        if self._stay:
            sleep = min(sleep, self._stay)
        sleep = max(0.0, min(sleep, self._deadline() - now))
        self._wakes_at = now + sleep
        return sleep

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._wake_out.send(b"\0")

    def _wake_reader(self) -> None:
        with contextlib.suppress(OSError):
            self._reader_out.send(b"\0")

    def _notify(self) -> None:
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    def _end(self) -> None:
        self.is_dead = True
        self._wake()
        self._wake_reader()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, errors.NebulaError):
            error = session.PeerGone(
                f"lost the connection to {self.connection.peer}: {error}"
            )
        self._error = self._error or error
        self._end()
        self._notify()

    def _say_at_last(self, reason: str) -> None:
        if self._pipe is not None:
            words = self.connection.abort(reason, time.monotonic())
            self._pipe.say_at_last(words, GOODBYE_SECONDS)

    # Connections come and go.

    def _adopt(self, sock: socket.socket) -> None:
        self._discard_pipe()
        self._pipe = socket_io.Pipe(sock, self._shaper, self._reader_in)
        self._is_unread = True  # TLS may have read beyond what opened the connection
        self._wake_reader()  # whoever waits on an older one

    def _discard_pipe(self, linger: bool = False) -> None:
        if self._pipe is None:
            return
        if self._watched:
            self._selector.unregister(self._pipe.socket)
            self._watched = 0
        self._pipe.close(linger)
        self._pipe = None

    def _lose(self, error: Exception) -> None:
        """The connection has broken; the session goes on if it can."""
        try:
            self._hear_out()
        except Exception as last_words:
            self._fail(last_words)
            return
        self._discard_pipe()
        self.connection.lost()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._loss = (
                str(error)
                if isinstance(error, errors.NebulaError)
                else f"lost the connection to {self.connection.peer}: {error}"
            )
            if self._reconnect_timeout and not self._has_heard_all:
                self._log(f"{self._loss}; waiting for it to come back")
        self._wake()
        self._wake_reader()

    def _reconnect(self) -> None:
        """One attempt at a new connection, after a pause that grows."""
        with self._io:
            self._turn(reads=False)  # what is said meanwhile joins the session
        if self._dial is None:
            self._pause(RECHECK_SECONDS)
            return
        self._pause(self._backoff * self._jitter.uniform(0.5, 1.0))
        self._backoff = min(max(FIRST_PAUSE, 2 * self._backoff), LONGEST_PAUSE)
        if self._last_words is not None:
            return
        try:
            sock = self._dial()
        except (errors.NebulaError, OSError) as error:
            self._why = f": {error}"
            return
        with self._io:
            self._adopt(sock)
            self.connection.begin(time.monotonic())
            self._turn(reads=False)
            self._watch()
        self._notify()

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, max(0.0, self._deadline() - time.monotonic()))
        with self._changed:
            self._waiters += 1
            self._changed.wait_for(
                lambda: self._pipe is not None or self._last_words is not None,
                seconds,
            )
            self._waiters -= 1

    def _deadline(self) -> float:
        """When a broken session is given up."""
        if self._lost_at is None:
            return float("inf")
        # What remains may be but a courtesy to a peer that has gone.
        longest = GOODBYE_SECONDS if self.connection.owes_only_end else LONGEST_SLEEP
        return self._lost_at + min(self._reconnect_timeout, longest)

    def _give_up(self) -> None:
        if self.connection.owes_only_end:
            self._end()
        elif not self._reconnect_timeout:
            self._fail(session.PeerGone(self._loss))
        else:
            self._fail(
                session.PeerGone(
                    f"{self._loss}, and no new connection came about within"
                    f" {self._reconnect_timeout:g} s (--reconnect_timeout){self._why}"
                )
            )

    def _note_recovery(self) -> None:
        """Once both sides have said Open, the connection is back."""
        if self._lost_at is None or not self.connection.is_running:
            return
        away = time.monotonic() - self._lost_at
        self._lost_at, self._backoff, self._why = None, 0.0, ""
        if not self._has_heard_all:
            self._log(
                f"the connection to {self.connection.peer} is back after {away:.1f} s"
            )


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # drained, or closed
        while sock.recv(4096):
            pass
