"""One side of a session between two clusters, without any I/O.

Messages are numbered and kept until the peer has acknowledged them; when a connection
breaks, both sides report on the next one how many they have received, and the rest is
sent again. So every message arrives exactly once and in order, or the session fails.

    session.begin(now)                       # or `resume`: there is a connection
    session.send(message)                    # queues a message
    while buffers := session.data_to_send(now): ...write them...
    view = session.buffer.get_buffer()       # the place of the next bytes
    session.receive(sock.recv_into(view), now)
    for message in session.events(): ...
    session.lost()                           # the connection has ended

Bytes of a tensor land in the aligned buffers that will be handed to the device. Time is
an argument: seconds on any clock that only goes forward.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from nebula_jax import errors, trace
from nebula_jax.communication.wire import (
    activity,
    frames,
    ledger,
    liveness,
    reader,
    receive_buffer,
    states,
    stuck_peers,
    windows,
)
from nebula_jax.communication.wire.integrity import PLAIN, Both
from nebula_jax.communication.wire.liveness import PeerGone as PeerGone

START_AGAIN = (
    "start the commands of all clusters again: they go on after the newest step that"
    " all have saved"
)
"""The remedy where a process has lost its session."""


class LocalProtocolError(errors.NebulaError):
    """A request of this side that the protocol does not allow now."""


class RemoteProtocolError(errors.NebulaError):
    """A message of the peer that the protocol does not allow."""


class PeerAborted(errors.NebulaError):
    """An Abort of the peer, with its reason."""


class SessionOver(errors.NebulaError):
    """An attempt to use, or to come back to, a session that has ended."""


_BEFORE_WELCOME = (states.State.START, states.State.GREETED)
_WELCOME = {
    states.Role.LISTENER: "link.welcome(step)",
    states.Role.CONNECTOR: "link.wait_for_welcome(timeout)",
}


class Session:
    """The state of one session."""

    def __init__(
        self, role: states.Role, session_id: bytes, peer_timeout: float
    ) -> None:
        """Starts without a connection; the id has 16 bytes, the timeout is seconds."""
        self.role, self._other, self.session_id = role, role.other, session_id
        self.peer = "the peer"
        self.hello: frames.Hello | None = None  # the peer's, once it has come
        self.is_paused = False  # True if nothing more is parsed before `channels_ready`
        self.ledger = ledger.Ledger()
        self.trace = trace.OFF  # of this process, for tensors on their way here
        self._ours: frames.Hello | None = None
        self.window = windows.SendWindow()
        self.liveness = liveness.Liveness(peer_timeout)
        self.watch = stuck_peers.Watch(peer_timeout)  # the progress of the peer
        self.report: Callable[[], activity.Report] = activity.Report
        """Returns what this process is doing, for Pings."""
        self._now, self._head_came, self._moved = 0.0, 0.0, 0
        self._schema = reader.Schema()
        self.states = states.STARTED  # the progress of both directions, by sender
        self._received = windows.ReceiveWindow()
        self._events: list[frames.Message] = []
        self._phase, self._epoch = states.Phase.NONE, 0
        self._forget_connection()

    @property
    def is_running(self) -> bool:
        """True if there is a connection on which both sides have sent Open."""
        return self._phase is states.Phase.RUNNING

    @property
    def crossed(self) -> int:
        """The messages that are known to have crossed, of both directions."""
        return self.window.acknowledged + self._received.count

    @property
    def is_over(self) -> bool:
        """True if both sides have sent End and acknowledged the other's."""
        is_known = self.window.acknowledged == self.window.next_sequence
        return self.owes_only_end and is_known and not self._received.unacknowledged

    @property
    def owes_only_end(self) -> bool:
        """True if the peer has sent all, and has all but perhaps our End."""
        missing = self.window.next_sequence - self.window.acknowledged
        return missing <= 1 and set(self.states.values()) == {states.State.ENDED}

    def add_sender(self, name: str) -> int:
        """Adds a channel of tensors that this side sends; returns its number."""
        return self.ledger.add_channel(ledger.SENT, name)

    def add_receiver(
        self, name: str, options: Sequence[Sequence[int]], is_compressed: bool = False
    ) -> int:
        """Adds a channel of tensors that the peer may send; returns its number.

        `options` has, for each shape, the exact size of each buffer of a tensor; if it
        `is_compressed` a buffer may be shorter, and a table has its length. Raises
        ValueError if it has too many buffers to be compressed.
        """
        self._schema.add(options, is_compressed)
        return self.ledger.add_channel(ledger.RECEIVED, name)

    def channels_ready(self) -> None:
        """Parses what follows the Welcome (connector only); raises as `receive`."""
        self.is_paused = False
        self._checked(self._parse)

    def check_open(self) -> None:
        """Checks that tensors may cross; raises LocalProtocolError if not yet."""
        if self.is_paused or self.states[self.role] in _BEFORE_WELCOME:
            raise LocalProtocolError(
                f"nothing crosses to or from {self.peer} before its Welcome: call"
                f" {_WELCOME[self.role]} first"
            )

    # Connections come and go.

    def begin(self, now: float, tags: Both = PLAIN) -> None:
        """Begins the session, or goes on, on a new connection (connector only)."""
        self._epoch += 1
        self._start(states.Phase.OPENING, now, tags)

    def resume(
        self, opening: frames.Open, acknowledged: int, now: float, tags: Both = PLAIN
    ) -> None:
        """Goes on with a new connection; RemoteProtocolError if it is not newer."""
        if opening.session_id != self.session_id or opening.epoch <= self._epoch:
            text = f"opened connection {opening.epoch} of a session at connection"
            raise RemoteProtocolError(f"{self.peer} {text} {self._epoch}")
        self._checked(self.window.acknowledge, acknowledged)
        self._epoch = opening.epoch
        self._start(states.Phase.RUNNING, now, tags)

    def _start(self, phase: states.Phase, now: float, tags: Both) -> None:
        self._forget_connection(tags)
        self._phase = phase
        self.window.rewind()
        self.liveness.connected(now)
        self.watch.connected(now)
        self._control.append(frames.Open(self.session_id, self._epoch))

    def lost(self) -> None:
        """Ends the connection; half a frame of it is no frame."""
        self._phase = states.Phase.NONE
        self.liveness.lost()
        self.window.note_waiting()
        self._forget_connection()

    def _forget_connection(self, tags: Both = PLAIN) -> None:
        self._control: collections.deque[frames.Message] = collections.deque()
        self._owes_ping = False
        self._received.acknowledge()  # Open does, on the next one
        self.buffer = buffer = receive_buffer.ReceiveBuffer()
        self._tags = tags.sent
        self._reader = reader.read(buffer, self._schema, self._admit, tags.received)

    # Sending.

    def send(self, message: frames.Message) -> None:
        """Queues a message; raises LocalProtocolError if it may not be sent now."""
        try:
            self.states = states.advance(self.states, self.role, type(message))
        except states.OutOfPlace as error:
            text = f"cannot send to {self.peer}: {error}"
            if self.states[self.role] in _BEFORE_WELCOME:
                text += f"; call {_WELCOME[self.role]} first"
            raise LocalProtocolError(text) from None
        if isinstance(message, frames.Hello):
            self._ours = message
        self.window.add(message)
        if not self.is_running:
            self.window.note_waiting()

    def abort(self, reason: str, now: float) -> list[Any]:
        """Ends the session, whatever is queued; returns the last buffers to write."""
        self.states = states.advance(self.states, self.role, frames.Abort)
        if self._phase is states.Phase.NONE:
            return []
        self._control.append(frames.Abort(reason))
        buffers = []
        while self._control:
            buffers += self._frame(self._control.popleft(), 0, now)
        return buffers

    def data_to_send(self, now: float) -> list[Any]:
        """Returns the buffers of the next frame to write; none if there is no frame."""
        if self._control:
            return self._frame(self._control.popleft(), 0, now)
        if self._phase is not states.Phase.RUNNING:
            return []
        if self._owes_ping:
            return self._ping(now)
        sequence = self.window.cursor
        if sequence < self.window.next_sequence:
            return self._frame(self.window.next(), sequence, now)
        is_last = self.states[self._other] is states.State.ENDED
        if self._received.is_due or (is_last and self._received.unacknowledged):
            return self._ping(now)
        return []

    def _ping(self, now: float) -> list[Any]:
        self._owes_ping = False
        ping = frames.Ping(*self.report(), self.watch.received)
        return self._frame(ping, 0, now)

    def _frame(self, message: frames.Message, sequence: int, now: float) -> list[Any]:
        acknowledged = self._received.acknowledge()
        buffers = frames.encode(message, sequence, acknowledged, self._tags)
        self.liveness.sent(now)
        self.ledger.count(ledger.SENT, message, sum(map(len, buffers)))
        return buffers

    def tick(self, now: float) -> None:
        """Keeps the connection alive; raises PeerGone if the peer is silent."""
        if self.liveness.timed_out(now):
            silence = self.liveness.silence(now)
            raise PeerGone(f"{self.peer} has been silent for {silence:.0f} s")
        if self.is_running and self.liveness.needs_ping(now):
            self.liveness.sent(now)
            self._owes_ping = True

    def next_tick(self, now: float) -> float:
        """Returns the seconds from `now` after which `tick` has something to do."""
        return self.liveness.next_check(now, pings=self.is_running)

    # Receiving.

    def receive(self, count: int, now: float) -> None:
        """Parses `count` bytes, written to the start of `buffer.get_buffer()`.

        Raises frames.Damaged if they are not those that were sent: nothing more can be
        received on this connection; RemoteProtocolError if they break the protocol or
        the schema.
        """
        self.liveness.received(now)
        self._now = now
        self._moved += count
        self.buffer.receive(count)
        self._checked(self._parse)
        self.watch.moved(self._moved, now)

    @property
    def has_events(self) -> bool:
        """True if whole messages have come."""
        return bool(self._events)

    def events(self) -> list[frames.Message]:
        """Returns all whole messages that have come since the last call."""
        events, self._events = self._events, []
        return events

    def _parse(self) -> None:
        while not (self.is_paused and self.is_running):
            received = next(self._reader)
            if received is None:
                return
            self._accept(*received)

    def _checked(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, and names the peer in the errors that are its fault."""
        try:
            return function(*args)
        except frames.Damaged as error:
            self.ledger.count_damage()
            raise frames.Damaged(
                f"bytes of {self.peer} arrived damaged ({error})"
            ) from None
        except frames.FrameError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        except states.OutOfPlace as error:
            raise RemoteProtocolError(f"{self.peer} sent {error}") from None

    def _admit(self, head: frames.Head) -> None:
        """Checks that a frame may come now, and takes its acknowledgement."""
        states.advance_phase(self._phase, head.kind)
        expected = 0
        if head.kind not in frames.UNNUMBERED:
            states.advance(self.states, self._other, head.kind)
            expected = self._received.count
        if head.sequence != expected:
            raise frames.FrameError(f"sent frame {head.sequence}; expected {expected}")
        if head.kind is frames.Open and not head.acknowledged:
            self._begin_again()
        self._head_came = self._now
        if head.kind is not frames.Abort:  # it may come from one without the session
            self.window.acknowledge(head.acknowledged)

    def _begin_again(self) -> None:
        """Sends Hello again to a peer that acknowledged it, and was restarted since."""
        if self.hello is None and self.window.acknowledged and self._ours is not None:
            self.window = windows.SendWindow()
            self.window.add(self._ours)

    def _trace(self, message: frames.Tensor, nbytes: int) -> None:
        """Records that a tensor was on the line until now."""
        name = self.ledger.channel(ledger.RECEIVED, message.channel)
        about = {"step": message.step, "micro_batch": message.micro_batch}
        when = self._head_came, self._now
        lane = f"line from {self.peer}"
        self.trace.add(lane, f"wire {name}", *when, bytes=nbytes, **about)

    def _accept(self, message: frames.Message, nbytes: int) -> None:
        kind = type(message)
        self.ledger.count(ledger.RECEIVED, message, nbytes)
        if isinstance(message, frames.Tensor):
            self._trace(message, nbytes)
        if kind is frames.Open and message != frames.Open(self.session_id, self._epoch):
            raise RemoteProtocolError(f"{self.peer} opened another session")
        if kind is not frames.Tensor:  # which changes no state
            self._phase = states.advance_phase(self._phase, kind)
            if isinstance(message, frames.Ping):
                report = activity.Report(message.activity, message.done)
                self.watch.pinged(report, message.received, self._now)
            if kind in (frames.Open, frames.Ping):
                self._moved -= nbytes
                return
            self.states = states.advance(self.states, self._other, kind)
        self._events.append(message)
        if kind is frames.Abort:
            return
        self._received.add(nbytes)
        if isinstance(message, frames.Hello):
            self.peer, self.hello = message.cluster, message
        elif isinstance(message, frames.Welcome):
            self.is_paused = True  # until `channels_ready`
