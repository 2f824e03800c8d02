"""One side of a session between two clusters, without any I/O.

A session outlives its connections. What is said is numbered and kept until the peer
has taken it; when a connection breaks, both sides say on the next one how much they
have taken, and the rest is sent again. So every message arrives exactly once and in
order, or the session fails.

    connection.begin(now)                    # or `resume`: there are bytes to exchange
    connection.send(message, now)            # says something, now or later
    for buffer in connection.data_to_send(now): ...write it...
    view = connection.get_buffer()           # where the next bytes belong
    n = sock.recv_into(view)
    connection.buffer_updated(n, now)
    while (message := connection.next_event()) is not None: ...
    connection.lost()                        # the bytes have ended

Bytes of a tensor land in the aligned buffers that will be handed to the device: there
is no copy in between. Time is an argument: seconds on any clock that only goes forward.

Everything that decides which message may come when is in TRANSITIONS.
"""

import collections
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from nebula_jax import errors
from nebula_jax.communication.wire import frames, receive_buffer, schema, send_window
from nebula_jax.communication.wire.frames import (
    Abort,
    End,
    Hello,
    Open,
    Ping,
    StepDone,
    Stop,
    Tensor,
    Welcome,
)

PINGS_PER_TIMEOUT = 4  # a peer is heard of this often before it counts as gone
ACK_BYTES = 1 << 20  # taken without a word; small against the window
ACK_FRAMES = 64
OPENING_BYTES = frames.HEAD.size + frames.Open.LAYOUT.size


class LocalProtocolError(errors.NebulaError):
    """This side asked for something that the protocol does not allow now."""


class RemoteProtocolError(errors.NebulaError):
    """The peer did something that the protocol does not allow."""


class PeerGone(errors.NebulaError):
    """The peer's connection ended, or fell silent, without a goodbye."""


class PeerAborted(errors.NebulaError):
    """The peer gave up and said why."""


class SessionOver(errors.NebulaError):
    """The session has ended; nothing more can be said, nobody can come back to it."""


class Role(enum.Enum):
    """The listener welcomes; the connector comes to it."""

    LISTENER = "listener"
    CONNECTOR = "connector"

    __hash__ = object.__hash__

    @property
    def other(self) -> "Role":
        return Role.CONNECTOR if self is Role.LISTENER else Role.LISTENER


class State(enum.Enum):
    """How far one direction of the conversation has come."""

    START = "before Hello"
    GREETED = "after Hello"
    OPEN = "open"
    ENDED = "after End or Abort"

    __hash__ = object.__hash__  # the tables are asked for every frame


# Who speaks -> state of that direction -> what may be said -> next state.
# One rule stands outside: Welcome opens the connector's direction as well.
TRANSITIONS = {
    Role.LISTENER: {
        State.START: {Hello: State.GREETED},
        State.GREETED: {Welcome: State.OPEN},
        State.OPEN: {
            Tensor: State.OPEN,
            StepDone: State.OPEN,
            Stop: State.OPEN,
            End: State.ENDED,
        },
        State.ENDED: {},
    },
    Role.CONNECTOR: {
        State.START: {Hello: State.GREETED},
        State.GREETED: {},
        State.OPEN: {
            Tensor: State.OPEN,
            Stop: State.OPEN,
            End: State.ENDED,
        },
        State.ENDED: {},
    },
}


class Phase(enum.Enum):
    """How far the present connection has come, and what may come on it."""

    NONE = "without a connection"
    OPENING = "before Open"
    RUNNING = "after Open"

    __hash__ = object.__hash__


# Phase -> what the peer may send that is not numbered -> next phase. Numbered frames
# may come when RUNNING, as far as TRANSITIONS allows them.
UNNUMBERED = {
    Phase.NONE: {},
    Phase.OPENING: {Open: Phase.RUNNING, Abort: Phase.NONE},
    Phase.RUNNING: {Ping: Phase.RUNNING, Abort: Phase.NONE},
}


class Connection:
    """The state of one session."""

    def __init__(self, role: Role, session: bytes, peer_timeout: float):
        """Starts without a connection.

        Args:
          role: of this side.
          session: 16 bytes that name it.
          peer_timeout: seconds of silence after which a connection counts as lost.
        """
        self.role, self.session = role, session
        self.peer = "the peer"
        self.is_paused = False
        """Whether nothing more is parsed before `all_planned`."""
        self.local_state = self.remote_state = State.START
        """How far each direction has come."""
        self._peer_timeout = peer_timeout
        self._ping_interval = peer_timeout / PINGS_PER_TIMEOUT
        self._ledger: dict[tuple[str, type, int], list[int]] = {}
        self._plan = schema.Plan()
        self._outgoing = send_window.Outgoing()
        self._taken = 0
        self._events: collections.deque[frames.Message] = collections.deque()
        self._phase, self._epoch = Phase.NONE, 0
        self._forget_connection()

    @property
    def is_running(self) -> bool:
        """Whether there is a connection on which both sides have said Open."""
        return self._phase is Phase.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether both sides have said End and know that the other one has it."""
        return (
            self.local_state is State.ENDED
            and self.remote_state is State.ENDED
            and self._outgoing.acked == self._outgoing.said
            and not self._unreported_frames
        )

    @property
    def owes_only_end(self) -> bool:
        """Whether the peer has said all, and has taken all but perhaps our End."""
        return (
            self.local_state is State.ENDED
            and self.remote_state is State.ENDED
            and self._outgoing.acked >= self._outgoing.said - 1
        )

    @property
    def has_window(self) -> bool:
        """Whether one more tensor may be said before the peer has taken others."""
        return self._outgoing.has_window

    @property
    def ledger(self) -> dict[str, list[int]]:
        """`sent Tensor[0]` and so on -> [frames, bytes]; sent again counts again."""
        ledger = {}
        for (direction, kind, channel), entry in list(self._ledger.items()):
            suffix = f"[{channel}]" if kind is Tensor else ""
            ledger[f"{direction} {kind.__name__}{suffix}"] = list(entry)
        return ledger

    def add_channel(
        self, options: Sequence[Sequence[int]], is_compressed: bool = False
    ) -> int:
        """Plans a channel of tensors that the peer may send.

        Args:
          options: for each shape, the exact size of each buffer of a tensor on it.
          is_compressed: whether a buffer may be shorter, and a table says how long.

        Returns:
          The channel's number: channels count from 0 in the order they are added.

        Raises:
          ValueError: if it has too many buffers to be compressed.
        """
        return self._plan.add(options, is_compressed)

    def all_planned(self) -> None:
        """Connector: channels are added, so what follows the Welcome may be read."""
        self.is_paused = False
        self._parse()

    # Connections come and go.

    def begin(self, now: float) -> None:
        """Connector: a new connection is there; the session begins, or goes on."""
        self._epoch += 1
        self._start(Phase.OPENING, now)

    def resume(self, opening: frames.Open, taken: int, now: float) -> None:
        """Listener: the peer has opened a new connection.

        Args:
          opening: what it said.
          taken: from the head of that frame.
          now: seconds.

        Raises:
          RemoteProtocolError: if it is another session, or not newer than the present
            connection, or has taken what was never sent.
        """
        if opening.session != self.session or opening.epoch <= self._epoch:
            raise RemoteProtocolError(
                f"{self.peer} opened connection {opening.epoch} of a session at"
                f" connection {self._epoch}"
            )
        self._take_ack(taken)
        self._epoch = opening.epoch
        self._start(Phase.RUNNING, now)

    def _start(self, phase: Phase, now: float) -> None:
        self._forget_connection()
        self._phase = phase
        self._outgoing.rewind()
        self._last_sent = self._last_received = now
        self._control.append(Open(self.session, self._epoch))

    def lost(self) -> None:
        """The connection has ended; half a frame of it is no frame."""
        self._phase = Phase.NONE
        self._forget_connection()

    def _forget_connection(self) -> None:
        self._control: collections.deque[frames.Message] = collections.deque()
        self._unreported_bytes = self._unreported_frames = 0
        self._assembly = receive_buffer.Assembly()
        self._head: frames.Head | None = None  # of the frame that is being read
        self._body: tuple[bytes, list[np.ndarray]] | None = None

    # Sending.

    def send(self, message: frames.Message) -> None:
        """Says something: `data_to_send` will return its frame when it can go.

        Raises:
          LocalProtocolError: if it may not be said now.
        """
        kind = type(message)
        allowed = TRANSITIONS[self.role][self.local_state]
        if kind not in allowed:
            raise LocalProtocolError(
                f"cannot send {kind.__name__} to {self.peer} {self.local_state.value}"
            )
        self.local_state = allowed[kind]
        if kind is Welcome and self.remote_state is State.GREETED:
            self.remote_state = State.OPEN
        self._outgoing.add(message)

    def abort(self, reason: str, now: float) -> list[Any]:
        """Gives up the session, whatever is still to be said.

        Returns:
          The buffers to write behind those that `data_to_send` has returned; none
          without a connection.
        """
        self.local_state = State.ENDED
        if self._phase is Phase.NONE:
            return []
        self._control.append(Abort(reason))
        buffers = []
        while self._control:
            buffers += self._frame(self._control.popleft(), 0, now)
        return buffers

    def data_to_send(self, now: float) -> list[Any]:
        """The next frame to write on the present connection.

        Returns:
          Its buffers, in order; none if there is nothing to say at present.
        """
        if self._control:
            return self._frame(self._control.popleft(), 0, now)
        if self._phase is not Phase.RUNNING:
            return []
        sequence = self._outgoing.cursor
        if sequence < self._outgoing.said:
            return self._frame(self._outgoing.next(), sequence, now)
        if self._unreported_frames and self._owes_ack:
            return self._frame(Ping(), 0, now)
        return []

    @property
    def wants_to_write(self) -> bool:
        """Whether `data_to_send` would return something."""
        if self._control:
            return True
        if self._phase is not Phase.RUNNING:
            return False
        if self._outgoing.cursor < self._outgoing.said:
            return True
        return self._unreported_frames > 0 and self._owes_ack

    @property
    def _owes_ack(self) -> bool:
        return (
            self._unreported_frames >= ACK_FRAMES
            or self._unreported_bytes >= ACK_BYTES
            or self.remote_state is State.ENDED
        )

    def _frame(self, message: frames.Message, sequence: int, now: float) -> list[Any]:
        buffers = frames.encode(message, sequence, self._taken)
        self._last_sent = now
        self._unreported_bytes = self._unreported_frames = 0
        size = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self._count("sent", message, size)
        return buffers

    def tick(self, now: float) -> None:
        """Keeps the connection alive; to be called when `next_tick` has come.

        Raises:
          PeerGone: if the peer has been silent for longer than the timeout.
        """
        if self._phase is Phase.NONE:
            return
        silence = now - self._last_received
        if silence >= self._peer_timeout:
            raise PeerGone(f"{self.peer} has been silent for {silence:.0f} s")
        if (
            self._phase is Phase.RUNNING
            and now >= self._last_sent + self._ping_interval
        ):
            self._last_sent = now
            self._control.append(Ping())

    def is_silent(self, now: float) -> bool:
        """Whether `tick` would raise."""
        return (
            self._phase is not Phase.NONE
            and now - self._last_received >= self._peer_timeout
        )

    def next_tick(self, now: float) -> float:
        """Seconds from `now` after which `tick` has something to do."""
        when = self._last_received + self._peer_timeout
        if self._phase is Phase.RUNNING:
            when = min(when, self._last_sent + self._ping_interval)
        return max(0.0, when - now)

    def not_reading(self, now: float) -> None:
        """Silence does not count while this side itself leaves bytes unread."""
        self._last_received = now

    # Receiving.

    def get_buffer(self) -> memoryview:
        """Where the next bytes from the peer belong; empty only while paused."""
        return self._assembly.get_buffer()

    def buffer_updated(self, count: int, now: float) -> None:
        """Takes note of `count` bytes written to the start of `get_buffer()`.

        Raises:
          RemoteProtocolError: if they break the protocol or the plan.
        """
        self._last_received = now
        self._assembly.filled(count)
        self._parse()

    @property
    def is_inside_tensor(self) -> bool:
        """Whether more bytes of a large tensor are due."""
        return self._assembly.has_holes

    def receive_data(self, data: bytes, now: float) -> None:
        """Takes bytes from anywhere: `get_buffer` and `buffer_updated` with a copy."""
        data = memoryview(data)
        while len(data):
            view = self.get_buffer()
            if not len(view):
                raise LocalProtocolError("paused: channels are to be added first")
            count = min(len(view), len(data))
            view[:count] = data[:count]
            self.buffer_updated(count, now)
            data = data[count:]

    def next_event(self) -> frames.Message | None:
        """The next whole message from the peer, or None."""
        return self._events.popleft() if self._events else None

    @property
    def has_events(self) -> bool:
        """Whether whole messages have come."""
        return bool(self._events)

    def events(self) -> list[frames.Message]:
        """All whole messages that have come since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def _parse(self) -> None:
        """Makes messages of what has come, as far as it goes."""
        parts = self._assembly
        while not parts.has_holes and not self._is_held:
            if self._head is None:
                if self._parse_small_tensor():
                    continue
                data = parts.peek(frames.HEAD.size)
                if data is None:
                    break
                self._head = self._checked_head(data)
                parts.drop(frames.HEAD.size)
            if self._body is None:
                self._body = self._begin_body(self._head)
                if self._body is None:
                    break
            if not parts.has_holes:
                self._finish()
        else:
            return
        parts.compact()

    @property
    def _is_held(self) -> bool:
        """Whether what has come is left alone: paused, unless it is only an Open."""
        return self.is_paused and self._phase is Phase.RUNNING

    def _parse_small_tensor(self) -> bool:
        """The most common case by a shorter way: a small tensor is all there.

        Returns:
          Whether it was. If anything is amiss, the long way will say what.
        """
        data = self._assembly.staged()
        size = frames.TENSOR.size
        if len(data) < size or self.remote_state is not State.OPEN:
            return False
        *start, sequence, taken, payload_bytes, channel, step, micro_batch, option = (
            frames.TENSOR.unpack_from(data)
        )
        if (
            tuple(start) != frames.TENSOR_START
            or self._phase is not Phase.RUNNING
            or sequence != self._taken
            or len(data) < size + payload_bytes
            or channel >= len(self._plan.channels)
        ):
            return False
        options, is_compressed = self._plan.channels[channel]
        if is_compressed or option >= len(options):
            return False
        sizes = options[option]
        if payload_bytes != (sizes[0] if len(sizes) == 1 else sum(sizes)):
            return False
        if taken != self._outgoing.acked:
            self._take_ack(taken)
        self._assembly.drop(size)
        buffers = self._assembly.take(sizes)
        self._heard(
            frames.Tensor(channel, step, micro_batch, buffers, option),
            size + payload_bytes,
        )
        return True

    def _checked_head(self, data: memoryview) -> frames.Head:
        try:
            head = frames.decode_head(data)
        except frames.FrameError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        kind, sequence, taken, _ = head
        expected = self._taken
        if kind in frames.UNNUMBERED:
            expected = 0
            if kind not in UNNUMBERED[self._phase]:
                raise self._out_of_place(kind, self._phase)
        elif self._phase is not Phase.RUNNING:
            raise self._out_of_place(kind, self._phase)
        elif kind not in TRANSITIONS[self.role.other][self.remote_state]:
            raise self._out_of_place(kind, self.remote_state)
        if sequence != expected:
            raise RemoteProtocolError(
                f"{self.peer} sent frame {sequence}; expected {expected}"
            )
        if kind is not Abort:  # it may come from one who knows no session
            self._take_ack(taken)
        return head

    def _out_of_place(self, kind: type, where: enum.Enum) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self.peer} sent {kind.__name__} {where.value}")

    def _take_ack(self, taken: int) -> None:
        try:
            self._outgoing.take_ack(taken)
        except ValueError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None

    def _begin_body(self, head: frames.Head) -> tuple[bytes, list[np.ndarray]] | None:
        """Reads the typed header and takes memory for the payload, within the plan.

        Returns:
          The header, and the payload's buffers, perhaps with holes; None if bytes are
          missing yet.
        """
        header_bytes = head.kind.LAYOUT.size
        header = self._assembly.peek(header_bytes)
        if header is None:
            return None
        header, table_bytes = bytes(header), 0
        try:
            if head.kind is Tensor:
                table_bytes, sizes = self._plan.tensor_sizes(
                    head, header, self._assembly
                )
                header_bytes += table_bytes
            else:
                sizes = self._plan.message_sizes(head)
        except ValueError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        if sizes is None:
            return None
        self._assembly.drop(header_bytes)
        return header, self._assembly.take(sizes)

    def _finish(self) -> None:
        """A whole message is there."""
        head, (header, buffers) = self._head, self._body
        self._head = self._body = None
        try:
            message = frames.decode(head, header, buffers)
        except frames.FrameError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        size = frames.HEAD.size + len(header) + head.payload_bytes
        if head.kind in frames.UNNUMBERED:
            self._heard_unnumbered(message, size)
        else:
            self._heard(message, size)

    def _heard_unnumbered(self, message: frames.Message, size: int) -> None:
        self._count("received", message, size)
        kind = type(message)
        self._phase = UNNUMBERED[self._phase][kind]
        if kind is Open and message != Open(self.session, self._epoch):
            raise RemoteProtocolError(f"{self.peer} opened another session")
        if kind is Abort:
            self.remote_state = State.ENDED
            self._events.append(message)

    def _heard(self, message: frames.Message, size: int) -> None:
        self._count("received", message, size)
        self._taken += 1
        self._unreported_frames += 1
        self._unreported_bytes += size
        kind = type(message)
        if kind is not Tensor:  # which changes no state
            self.remote_state = TRANSITIONS[self.role.other][self.remote_state][kind]
        if kind is Hello:
            self.peer = message.cluster
        elif kind is Welcome:
            self.is_paused = True  # until `all_planned`
            if self.local_state is State.GREETED:
                self.local_state = State.OPEN
        self._events.append(message)

    def _count(self, direction: str, message: frames.Message, size: int) -> None:
        """The byte ledger: what crossed, by direction, kind and channel."""
        kind = type(message)
        key = (direction, kind, message.channel if kind is Tensor else 0)
        entry = self._ledger.get(key)
        if entry is None:
            entry = self._ledger[key] = [0, 0]
        entry[0] += 1
        entry[1] += size


def read_opening(data: bytes) -> tuple[frames.Open, int]:
    """What a connector says first, on a connection of a session yet to be found.

    Args:
      data: the first OPENING_BYTES of the connection.

    Returns:
      The frame, and how much the connector has taken, for `Connection.resume`.

    Raises:
      RemoteProtocolError: if it is something else.
    """
    try:
        head = frames.decode_head(data[: frames.HEAD.size])
    except frames.FrameError as error:
        raise RemoteProtocolError(f"the peer {error}") from None
    if head.kind is not Open or head.sequence or head.payload_bytes:
        raise RemoteProtocolError(f"the peer sent {head.kind.__name__} before Open")
    return frames.decode(head, data[frames.HEAD.size :], []), head.taken
