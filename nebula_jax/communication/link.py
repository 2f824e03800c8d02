"""One conversation with another cluster: a socket, and the thread that owns it.

An SSL object bears no two threads, so one thread reads and writes while the main
thread computes; all it does per turn is bounded, so that nothing starves. Both ends
keep memory bounded: `put_tensor` blocks when MAX_UNSENT tensors wait to leave, and the
socket is not read while MAX_UNREAD wait to be used, so that TCP holds the sender back.
"""

import collections
import contextlib
import selectors
import socket
import ssl
import threading
import time

import jax

from nebula_jax import errors
from nebula_jax.communication import channels, frames, protocol, wan
from nebula_jax.communication import codec as codec_lib

MAX_UNSENT = 2  # tensors: one on the line, one behind it
MAX_UNREAD = 4  # tensors: enough that the line never waits for the reader
MAX_UNREAD_WHILE_WAITING = 64  # a peer that floods one channel while another is due
SEND_BYTES = 1 << 18  # per call: large enough for full speed, small enough to stay fair
TURN_SECONDS = 0.05  # of reading or writing before the other gets its turn
GOODBYE_SECONDS = 5.0  # to deliver an Abort before the socket is closed
LINGER_SECONDS = 1.0  # for the peer to read our last words before the socket is gone
LONGEST_SLEEP = 3600.0  # seconds: selectors refuse a few weeks


class Timeout(errors.NebulaError):
    """The peer did not say what was due within --connect_timeout."""


class Link:
    """One conversation with another cluster. Made by `bridge.connect` and `accept`."""

    def __init__(
        self,
        sock: socket.socket,
        role: protocol.Role,
        hello: frames.Hello,
        peer_timeout: float,
        line: wan.Line,
    ):
        self._socket = sock
        self._connection = protocol.Connection(role, peer_timeout, time.monotonic())
        self._peer_timeout = peer_timeout
        self._shaper = wan.Shaper(line)
        self._changed = threading.Condition()  # guards all that follows
        self._outbox: collections.deque[frames.Message] = collections.deque([hello])
        self._inbox: dict[int, collections.deque[frames.Tensor]] = {}
        self._senders = 0
        self._peer_hello: frames.Hello | None = None
        self._welcome: int | None = None
        self._stop: int | None = None
        self._step_done = 0
        self._waiting_for_tensor = False
        self._planned = role is protocol.Role.LISTENER
        self._peer_ended = False
        self._closing = self._aborted = self._at_eof = False
        self._error: Exception | None = None
        self.waited = 0.0
        """Seconds that the main thread spent waiting for the peer or the line."""
        self.certificate_names = _certificate_names(sock)
        """DNS names of the peer's certificate; None without TLS."""

        sock.setblocking(False)
        _no_delay(sock)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._thread.start()

    # What experiments use.

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""
        assert self._peer_hello is not None
        return self._peer_hello

    @property
    def ledger(self) -> dict[str, list[int]]:
        """`sent Tensor[0]` and so on -> [frames, bytes], heads included."""
        entries = list(self._connection.ledger.items())  # the thread adds to it
        return {kind: list(entry) for kind, entry in entries}

    def bytes_moved(self, direction: str) -> int:
        """All bytes `sent` or `received` so far, below TLS and TCP."""
        ledger = self.ledger
        return sum(ledger[kind][1] for kind in ledger if kind.startswith(direction))

    def wait_for_hello(self, timeout: float) -> None:
        """Waits until the peer has said who it is."""
        self._wait(lambda: self._peer_hello is not None, timeout, "a Hello")

    def sender(self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec):
        """A channel for arrays like `spec`; both ends add theirs in the same order."""
        with self._changed:
            self._senders += 1
            return channels.Sender(self, self._senders - 1, name, spec, codec)

    def receiver(
        self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec, sharding=None
    ):
        """The other end of the peer's next channel.

        To be added before `welcome` is called, or `wait_for_welcome`: until then
        nothing that comes after a Welcome is read.

        `sharding` is where received arrays go (a tree like `spec`, or one for all).
        """
        payload = codec_lib.payload_spec(codec, spec)
        sizes = [codec_lib.nbytes(leaf) for leaf in jax.tree.leaves(payload)]
        with self._changed:
            channel = self._connection.add_channel(sizes)
            self._inbox[channel] = collections.deque()
        return channels.Receiver(self, channel, name, spec, codec, sharding)

    def welcome(self, step: int) -> None:
        """Listener: tells the peer after which step the run goes on."""
        self._put(frames.Welcome(step))

    def wait_for_welcome(self, timeout: float) -> int:
        """Connector: waits for all clusters to be there; the step to go on after."""
        self._wait(lambda: self._welcome is not None, timeout, "the other clusters")
        with self._changed:
            self._planned = True
        self._wake()
        return self._welcome

    def step_done(self, step: int) -> None:
        """Listener: sends the step token of `step`."""
        self._put(frames.StepDone(step))

    def wait_for_step(self, step: int) -> None:
        """Waits for the step token of `step` or a later one."""
        self._wait(lambda: self._step_done >= step)

    def stop(self, step: int = 0) -> None:
        """Listener: the run ends after `step`. Connector: asks for that, with 0."""
        self._put(frames.Stop(step))

    @property
    def stop_step(self) -> int | None:
        """What the peer said about stopping, if anything."""
        with self._changed:
            return self._stop

    def close(self) -> None:
        """Says End, waits for the peer's, and closes. Nothing queued is lost."""
        self._put(frames.End())
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self, reason: str) -> None:
        """Tells the peer why this side gives up, and closes."""
        with self._changed:
            self._outbox.clear()
            self._outbox.append(frames.Abort(reason))
            self._closing = True
        self._wake()
        self._thread.join(GOODBYE_SECONDS)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        else:
            self.abort(str(error) or kind.__name__)

    # The main thread's half.

    def _put(self, message: frames.Message) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            self._outbox.append(message)
        self._wake()

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor; blocks while too much waits. For `channels.Sender`."""
        self._wait(lambda: self._unsent() < MAX_UNSENT)
        self._put(message)

    def _unsent(self) -> int:
        return sum(isinstance(message, frames.Tensor) for message in self._outbox)

    def take_tensor(self, channel: int) -> frames.Tensor:
        """The next tensor of a channel; waits for it. For `channels.Receiver`.

        Raises:
          protocol.RemoteProtocolError: if the peer ends, or floods other channels.
        """
        inbox = self._inbox[channel]
        with self._changed:
            self._waiting_for_tensor = True
        self._wake()
        try:
            self._wait(lambda: bool(inbox) or not self._has_room())
            with self._changed:
                if not inbox:
                    raise protocol.RemoteProtocolError(
                        f"{self._connection.peer} sent {MAX_UNREAD_WHILE_WAITING}"
                        f" tensors that nobody waits for, none on channel {channel}"
                    )
                message = inbox.popleft()
        finally:
            with self._changed:
                self._waiting_for_tensor = False
        self._wake()  # there may be room to read again
        return message

    def _wait(self, predicate, timeout: float | None = None, what: str = "") -> None:
        """Waits for something that only the peer can bring about."""
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: predicate() or self._error is not None or self._peer_ended,
                timeout,
            )
            self.waited += time.monotonic() - start
            if predicate():
                return
            if self._error is not None:
                raise self._error
            if self._peer_ended:
                raise protocol.RemoteProtocolError(
                    f"{self._connection.peer} said End while more was due"
                )
        raise Timeout(
            f"{self._connection.peer}: waited {timeout:g} s for {what}"
            " (--connect_timeout)"
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended; _error says why
            self._wake_out.send(b"\0")

    # The thread's half.

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_in, selectors.EVENT_READ)
                selector.register(self._socket, selectors.EVENT_READ)
                while self._turn(selector):
                    pass
        except Exception as error:  # whatever it is, the main thread must hear of it
            self._fail(error)
        finally:
            if self._aborted or self._error is not None:
                _linger(self._socket)
            self._socket.close()
            self._wake_in.close()
            self._wake_out.close()
            with self._changed:
                if self._error is None and not self._closing:
                    self._error = protocol.PeerGone(f"{self._connection.peer} ended")
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, errors.NebulaError):
            error = protocol.PeerGone(
                f"lost the connection to {self._connection.peer}: {error}"
            )
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if isinstance(error, protocol.RemoteProtocolError):
            self._try_to_say(frames.Abort(str(error)))

    def _try_to_say(self, message: frames.Message) -> None:
        """Last words, behind what is under way: a frame is never cut by another."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        with contextlib.suppress(errors.NebulaError, OSError):
            for buffer in self._connection.send(message, time.monotonic()):
                self._shaper.put(buffer, time.monotonic())
            self._socket.settimeout(GOODBYE_SECONDS)
            while (view := self._shaper.due(float("inf"))) is not None:
                self._shaper.wrote(self._socket.send(view) if len(view) else 0)
                if time.monotonic() > deadline:
                    return

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Moves what can be moved, then sleeps until something changes."""
        now = time.monotonic()
        self._fill_shaper(now)
        blocked, more = self._write(now)
        reading = self._wants_to_read()
        if reading:
            more |= self._read()
        else:
            self._connection.not_reading(now)
        with self._changed:
            done = self._closing and not self._outbox and self._shaper.empty
        ended = self._connection.remote_state is protocol.State.ENDED
        if done and (ended or self._aborted):
            return False
        now = time.monotonic()
        for buffer in self._connection.tick(now):
            self._shaper.put(buffer, now)

        waits = [LONGEST_SLEEP, self._connection.next_tick(now)]
        if not blocked and (wait := self._shaper.wait(now)) is not None:
            waits.append(wait)
        if more:
            waits.append(0.0)  # TLS may hold bytes that the selector cannot see
        events = selectors.EVENT_READ if self._wants_to_read() else 0
        events |= selectors.EVENT_WRITE if blocked else 0
        _watch(selector, self._socket, events)
        for key, _ in selector.select(min(waits)):
            if key.fileobj is self._wake_in:
                self._drain_wakes()
        return True

    def _drain_wakes(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _fill_shaper(self, now: float) -> None:
        while self._shaper.ready(now):
            with self._changed:
                if not self._outbox:
                    return
                message = self._outbox.popleft()
                buffers = self._connection.send(message, now)
                self._changed.notify_all()
            self._aborted |= isinstance(message, frames.Abort)
            for buffer in buffers:
                self._shaper.put(buffer, now)

    def _write(self, now: float) -> tuple[bool, bool]:
        """Writes what is due.

        Returns:
          Whether the socket takes no more at present, and whether there is more to
          write for which this turn had no time.
        """
        deadline = time.monotonic() + TURN_SECONDS
        while (view := self._shaper.due(now)) is not None:
            if time.monotonic() > deadline:
                return False, True
            if not len(view):
                self._shaper.wrote(0)
                continue
            try:
                self._shaper.wrote(self._socket.send(view[:SEND_BYTES]))
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True, False
            except OSError:
                self._read()  # the peer's own last words say more than our error
                raise
            self._fill_shaper(now)
        return False, False

    def _wants_to_read(self) -> bool:
        with self._changed:
            if self._at_eof or (self._welcome is not None and not self._planned):
                return False
            return self._closing or self._has_room()

    def _has_room(self) -> bool:
        limit = MAX_UNREAD_WHILE_WAITING if self._waiting_for_tensor else MAX_UNREAD
        return sum(len(inbox) for inbox in self._inbox.values()) < limit

    def _read(self) -> bool:
        """Reads what is there; whether there is more, for another turn."""
        deadline = time.monotonic() + TURN_SECONDS
        while (now := time.monotonic()) < deadline:
            try:
                count = self._socket.recv_into(self._connection.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if count == 0:
                self._connection.receive_eof()
                self._at_eof = True
                return False
            self._connection.buffer_updated(count, now)
            with self._changed:
                while (message := self._connection.next_event()) is not None:
                    self._receive(message)
                self._changed.notify_all()
            if not self._wants_to_read():
                return False
        return True

    def _receive(self, message: frames.Message) -> None:
        match message:
            case frames.Tensor(channel=channel):
                if not self._closing:  # nobody will ask for it any more
                    self._inbox[channel].append(message)
            case frames.End():
                self._peer_ended = True
            case frames.StepDone(step=step):
                self._step_done = max(self._step_done, step)
            case frames.Stop(step=step):
                self._stop = step
            case frames.Hello():
                self._peer_hello = message
            case frames.Welcome(step=step):
                self._welcome = step
                self._step_done = step
            case frames.Abort(reason=reason):
                raise protocol.PeerAborted(f"{self._connection.peer} gave up: {reason}")


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


def _watch(selector: selectors.BaseSelector, sock: socket.socket, events: int) -> None:
    if not events:
        if sock in selector.get_map():
            selector.unregister(sock)
    elif sock not in selector.get_map():
        selector.register(sock, events)
    elif selector.get_key(sock).events != events:
        selector.modify(sock, events)


def _no_delay(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _certificate_names(sock: socket.socket) -> set[str] | None:
    if not isinstance(sock, ssl.SSLSocket):
        return None
    names = sock.getpeercert().get("subjectAltName", ())
    return {value for kind, value in names if kind == "DNS"}
