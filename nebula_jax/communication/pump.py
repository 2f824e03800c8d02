"""Moves bytes between a session and whatever connection it has at present.

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
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from nebula_jax import errors
from nebula_jax.communication import frames, protocol, wan

SEND_BYTES = 1 << 18  # per call: large enough for full speed, small enough to stay fair
INLINE_BYTES = 1 << 16  # a message up to this size is written by the one who says it
TURN_SECONDS = 0.05  # of reading or writing before the other gets its turn
GOODBYE_SECONDS = 5.0  # to deliver an Abort, or to hear that our End has come
LINGER_SECONDS = 1.0  # for the peer to read our last words before the socket is gone
LONGEST_SLEEP = 3600.0  # seconds: selectors refuse a few weeks
RECHECK_SECONDS = 0.1  # a waiter who cannot read looks again this often
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to dial again

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Pump:
    """The moving part of a link."""

    def __init__(
        self,
        connection: protocol.Connection,
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
        self._changed = threading.Condition()
        self._io = threading.Lock()  # guards the connection and all that follows
        self._reading = threading.Lock()  # held by the caller who reads
        self._has_reader = False
        self._socket: socket.socket | None = None
        self._is_tls = False
        self._is_blocked = False  # the socket takes no more at present
        self._has_more = False  # there was no time to read or write all
        self._is_stalled = False  # bytes wait for room to read them into
        self._watched = 0  # events that the selector wakes for
        self._wakes_at = 0.0  # when the thread will look again by itself
        self._lost_at: float | None = None  # None while there is a connection
        self._loss = self._why = ""  # how it was lost; why it does not come back
        self._backoff = 0.0  # seconds until dialling again
        self._jitter = random.Random(connection.session)
        self._last_words: str | None = None
        self._is_over = False
        self._error: Exception | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = _pair()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._reader_in, self._reader_out = _pair()
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)

    # What a link uses.

    def start(self, sock: socket.socket) -> None:
        """Connector: begins the session on a connected socket."""
        with self._io:
            self._adopt(sock)
            self.connection.begin(time.monotonic())
            self._turn(reads=False)
        self._thread.start()

    def attach(self, sock: socket.socket, opening: frames.Open, taken: int) -> None:
        """Listener: the peer has come (again), on this socket.

        Raises:
          protocol.RemoteProtocolError: if this is no connection to go on with; the
            present one, if any, stays.
        """
        with self._io:
            if self.is_dead:
                raise protocol.RemoteProtocolError("the session has ended")
            self.connection.resume(opening, taken, time.monotonic())
            is_first = not self._thread.is_alive()
            self._discard_socket()
            self._adopt(sock)
            self._turn(reads=False)
        if is_first:
            self._thread.start()
        self._wake()
        self._notify()

    @property
    def is_dead(self) -> bool:
        """Whether nothing moves any more."""
        return self._is_over or self._error is not None

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
        self.check()
        if self._is_over:
            raise protocol.LocalProtocolError(
                f"the session with {self.connection.peer} has ended"
            )
        self._outbox.append(message)
        if nbytes <= INLINE_BYTES and self._io.acquire(blocking=False):
            try:
                self._turn(reads=False)
                self._nudge()
            finally:
                self._io.release()
            self.check()
        else:
            self._wake()

    def all_planned(self) -> None:
        """Connector: all channels are added, what follows the Welcome may be read."""
        with self._io:
            self.connection.all_planned()
            self._deliver()
        self._wake()

    def room_was_made(self) -> None:
        """To be called when something was taken that `receive` had been given."""
        if self._is_stalled:
            self._wake()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate` holds or the session has ended, reading meanwhile.

        Returns:
          Whether the predicate holds.
        """
        deadline = time.monotonic() + (LONGEST_SLEEP if timeout is None else timeout)
        while not predicate() and not self.is_dead:
            remaining = deadline - time.monotonic()
            if remaining <= 0 and timeout is not None:
                break
            can_read = self._socket is not None and self._wants_to_read()
            if can_read and self._reading.acquire(blocking=False):
                try:
                    self._read_until(predicate, deadline)
                finally:
                    self._reading.release()
                    self._notify()
            else:
                with self._changed:
                    if not predicate() and not self.is_dead:
                        self._changed.wait(min(max(remaining, 0.0), RECHECK_SECONDS))
        return predicate()

    def abort(self, reason: str) -> None:
        """Ends the session; the peer is told why, if it can be reached."""
        self._last_words = reason
        self._wake()
        if self._thread.is_alive():
            self._thread.join(GOODBYE_SECONDS)
        if not self._thread.is_alive():
            self._close()

    def join(self) -> None:
        """Waits for the thread to have ended, and frees what it used."""
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for sock in (self._wake_in, self._wake_out, self._reader_in, self._reader_out):
            sock.close()

    # Moving bytes; `_io` is held.

    def _turn(self, reads: bool) -> None:
        """Moves what can be moved without waiting."""
        if self.is_dead:
            return
        try:
            while self._outbox:
                self.connection.send(self._outbox.popleft())
            if self._socket is None:
                return
            self._has_more = False
            now = time.monotonic()
            self._write(now)
            if reads:
                if self._wants_to_read():
                    self._read()
                else:
                    self.connection.not_reading(now)
            self._note_recovery()
            now = time.monotonic()
            self.connection.tick(now)
            self._write(now)
            if self.connection.is_over and self._shaper.empty and not self._outbox:
                self._is_over = True
                self._wake()
        except (OSError, protocol.PeerGone) as error:
            self._lose(error)
        except Exception as error:  # whatever it is, who waits must hear of it
            self._fail(error)
        self._watch()

    def _write(self, now: float) -> None:
        deadline = time.monotonic() + TURN_SECONDS
        self._is_blocked = False
        while True:
            view = self._shaper.due(now)
            if view is None:
                if not self._shaper.ready(now):
                    return
                buffers = self.connection.data_to_send(now)
                if not buffers:
                    return
                for buffer in buffers:
                    self._shaper.put(buffer, now)
            elif not len(view):
                self._shaper.wrote(0)
            elif time.monotonic() > deadline:
                self._has_more = True
                return
            else:
                try:
                    self._shaper.wrote(self._socket.send(view[:SEND_BYTES]))
                except BLOCKED:
                    self._is_blocked = True
                    return
                except OSError:
                    self._read()  # the peer's own last words say more than our error
                    raise

    def _read(self) -> None:
        connection, sock = self.connection, self._socket
        deadline = time.monotonic() + TURN_SECONDS
        while self._wants_to_read():
            view = connection.get_buffer()
            try:
                count = sock.recv_into(view)
            except BLOCKED:
                return
            now = time.monotonic()
            if count == 0:
                raise protocol.PeerGone(
                    f"{connection.peer} closed the connection without a goodbye"
                )
            connection.buffer_updated(count, now)
            self._deliver()
            if count < len(view) and self._is_drained(sock):
                return
            if now > deadline:
                self._has_more = True
                return

    def _deliver(self) -> None:
        has_news = False
        while (message := self.connection.next_event()) is not None:
            has_news = True
            if isinstance(message, frames.Abort):
                raise protocol.PeerAborted(
                    f"{self.connection.peer} gave up: {message.reason}"
                )
            self._receive(message)
        if has_news:
            self._notify()

    def _is_drained(self, sock: socket.socket) -> bool:
        """After a short read: whether another one would surely find nothing.

        TLS hands out a record at a time, so within a tensor there may be more.
        """
        if not self._is_tls:
            return True
        return not self.connection.is_inside_tensor and not sock.pending()

    def _wants_to_read(self) -> bool:
        return not self.connection.is_paused and self._has_room()

    def _watch(self) -> None:
        """Tells the thread's selector what to wake for; it may be asleep in it."""
        if self._socket is None:
            return
        self._is_stalled = not self._wants_to_read()
        events = selectors.EVENT_WRITE if self._is_blocked else 0
        if not self._has_reader and not self._is_stalled:
            events |= selectors.EVENT_READ
        if events == self._watched:
            return
        if not self._watched:
            self._selector.register(self._socket, events)
        elif not events:
            self._selector.unregister(self._socket)
        else:
            self._selector.modify(self._socket, events)
        self._watched = events

    def _nudge(self) -> None:
        """Wakes the thread if there is something for it before it will look again."""
        now = time.monotonic()
        wait = None if self._is_blocked else self._shaper.wait(now)
        if self._has_more or (wait is not None and now + wait < self._wakes_at):
            self._wake()

    # The caller who waits.

    def _read_until(self, predicate: Callable[[], bool], deadline: float) -> None:
        with self._io:
            sock = self._socket
            if sock is None:
                return
            self._has_reader, was_stalled = True, self._is_stalled
            self._watch()
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        poller.register(self._reader_in, select.POLLIN)
        try:
            while not predicate() and not self.is_dead:
                sleep = deadline - time.monotonic()
                if sleep < 0:
                    return
                if self._has_more or was_stalled:
                    sleep, was_stalled = 0.0, False
                ready = poller.poll(1000 * sleep)
                if any(fd == self._reader_in.fileno() for fd, _ in ready):
                    _drain(self._reader_in)
                with self._io:
                    if self._socket is not sock or not self._wants_to_read():
                        return
                    self._turn(reads=True)
                    self._nudge()
        finally:
            with self._io:
                self._has_reader = False
                self._watch()
                self._nudge()

    # The thread.

    def _run(self) -> None:
        try:
            while not self.is_dead:
                if self._last_words is not None:
                    with self._io:
                        self._try_to_say(self._last_words)
                    self._is_over = True
                elif time.monotonic() >= self._deadline():
                    self._give_up()
                elif self._socket is None:
                    self._reconnect()
                else:
                    with self._io:
                        sleep = self._sleep()
                    for key, _ in self._selector.select(sleep):
                        if key.fileobj is self._wake_in:
                            _drain(self._wake_in)
                    with self._io:
                        self._turn(reads=not self._has_reader)
        except Exception as error:  # whatever it is, who waits must hear of it
            self._fail(error)
        finally:
            with self._io:
                self._is_over = True
                if isinstance(self._error, protocol.RemoteProtocolError):
                    self._try_to_say(str(self._error))
                if self._socket is not None:
                    _linger(self._socket)
                self._discard_socket()
                self._selector.close()
            self._notify()

    def _sleep(self) -> float:
        """Seconds until there is something to do without anybody's doing."""
        now = time.monotonic()
        waits = [LONGEST_SLEEP, self.connection.next_tick(now), self._deadline() - now]
        if not self._is_blocked and (wait := self._shaper.wait(now)) is not None:
            waits.append(wait)
        if self._has_more or self._outbox:
            waits.append(0.0)  # TLS may hold bytes that the selector cannot see
        sleep = max(0.0, min(waits))
        self._wakes_at = now + sleep
        return sleep

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._wake_out.send(b"\0")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Connections come and go.

    def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._is_blocked = self._has_more = False
        self._watched = 0

    def _discard_socket(self) -> None:
        if self._socket is None:
            return
        if self._watched:
            self._selector.unregister(self._socket)
            self._watched = 0
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a caller who reads it
        self._socket.close()
        self._socket = None
        self._shaper.clear()

    def _lose(self, error: Exception) -> None:
        """The connection has broken; the session goes on if it can."""
        self._discard_socket()
        self.connection.lost()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._loss = (
                str(error)
                if isinstance(error, errors.NebulaError)
                else f"lost the connection to {self.connection.peer}: {error}"
            )
            if self._reconnect_timeout and not self._has_peer_ended:
                self._log(f"{self._loss}; waiting for it to come back")
        self._wake()
        with contextlib.suppress(OSError):
            self._reader_out.send(b"\0")

    @property
    def _has_peer_ended(self) -> bool:
        return self.connection.remote_state is protocol.State.ENDED

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
        self._notify()

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, max(0.0, self._deadline() - time.monotonic()))
        with self._changed:
            self._changed.wait_for(
                lambda: self._socket is not None or self._last_words is not None,
                seconds,
            )

    def _deadline(self) -> float:
        """When a broken session is given up."""
        if self._lost_at is None:
            return float("inf")
        # A peer that has said End has said all: what remains is a courtesy to it.
        longest = GOODBYE_SECONDS if self._has_peer_ended else LONGEST_SLEEP
        return self._lost_at + min(self._reconnect_timeout, longest)

    def _give_up(self) -> None:
        if self._has_peer_ended:
            self._is_over = True
        elif not self._reconnect_timeout:
            self._fail(protocol.PeerGone(self._loss))
        else:
            self._fail(
                protocol.PeerGone(
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
        if not self._has_peer_ended:
            self._log(
                f"the connection to {self.connection.peer} is back after {away:.1f} s"
            )

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, errors.NebulaError):
            error = protocol.PeerGone(
                f"lost the connection to {self.connection.peer}: {error}"
            )
        self._error = self._error or error
        self._wake()
        with contextlib.suppress(OSError):
            self._reader_out.send(b"\0")
        self._notify()

    def _try_to_say(self, reason: str) -> None:
        """Last words, behind what is under way: a frame is never cut by another."""
        if self._socket is None:
            return
        deadline = time.monotonic() + GOODBYE_SECONDS
        with contextlib.suppress(errors.NebulaError, OSError):
            now = time.monotonic()
            for buffer in self.connection.abort(reason, now):
                self._shaper.put(buffer, now)
            self._socket.settimeout(GOODBYE_SECONDS)
            while (view := self._shaper.due(float("inf"))) is not None:
                self._shaper.wrote(self._socket.send(view) if len(view) else 0)
                if time.monotonic() > deadline:
                    return


def _linger(sock: socket.socket) -> None:
    """Lets the peer read our last words: unread bytes here would reset them away."""
    try:
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(LINGER_SECONDS)
        deadline = time.monotonic() + LINGER_SECONDS
        while sock.recv(1 << 16) and time.monotonic() < deadline:
            pass
    except (OSError, ValueError):
        pass


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(4096):
            pass
