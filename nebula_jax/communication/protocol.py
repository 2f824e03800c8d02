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
from typing import Any, NamedTuple

import numpy as np

from nebula_jax import errors
from nebula_jax.communication import frames
from nebula_jax.communication.frames import (
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

ALIGNMENT = 64  # bytes; XLA takes a host buffer as it is only if aligned so
PINGS_PER_TIMEOUT = 4  # a peer is heard of this often before it counts as gone
STAGE_BYTES = 1 << 12  # a small frame is read by one call; a large one's start copied
WINDOW_BYTES = 16 << 20  # not yet taken; 170 Mbit/s fill half of it in 0.4 s
WINDOW_TENSORS = 2  # however large: one on its way while the other is acknowledged
WINDOW_FRAMES = 4096  # however small
ACK_BYTES = 1 << 20  # taken without a word; small against the window
ACK_FRAMES = 64
TABLE_ENTRY_BYTES = 8  # a length in the table of a compressed tensor
OPENING_BYTES = frames.HEAD.size + frames.Open.LAYOUT.size


class LocalProtocolError(errors.NebulaError):
    """This side asked for something that the protocol does not allow now."""


class RemoteProtocolError(errors.NebulaError):
    """The peer did something that the protocol does not allow."""


class PeerGone(errors.NebulaError):
    """The peer's connection ended, or fell silent, without a goodbye."""


class PeerAborted(errors.NebulaError):
    """The peer gave up and said why."""


class Role(enum.Enum):
    """The listener welcomes; the connector comes to it."""

    LISTENER = "listener"
    CONNECTOR = "connector"

    @property
    def other(self) -> "Role":
        return Role.CONNECTOR if self is Role.LISTENER else Role.LISTENER


class State(enum.Enum):
    """How far one direction of the conversation has come."""

    START = "before Hello"
    GREETED = "after Hello"
    OPEN = "open"
    ENDED = "after End or Abort"


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


# Phase -> what the peer may send that is not numbered -> next phase. Numbered frames
# may come when RUNNING, as far as TRANSITIONS allows them.
UNNUMBERED = {
    Phase.NONE: {},
    Phase.OPENING: {Open: Phase.RUNNING, Abort: Phase.NONE},
    Phase.RUNNING: {Ping: Phase.RUNNING, Abort: Phase.NONE},
}


class Plan(NamedTuple):
    """What may come on a channel."""

    options: tuple[tuple[int, ...], ...]
    """For each shape that the codec offers, the size of each buffer in bytes."""
    is_compressed: bool
    """Whether sizes are limits, and a table of the true ones comes first."""


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
        self.ledger: dict[str, list[int]] = {}
        """`sent Tensor[0]` and so on -> [frames, bytes]; sent again counts again."""
        self._peer_timeout = peer_timeout
        self._states = {Role.LISTENER: State.START, Role.CONNECTOR: State.START}
        self._channels: list[Plan] = []
        self._events: collections.deque[frames.Message] = collections.deque()
        # Sequence numbers: _acked <= _cursor <= _said.
        self._unacked: collections.deque[frames.Message] = collections.deque()
        self._acked = self._cursor = self._ever_sent = self._said = 0
        self._unacked_bytes = self._unacked_tensors = 0
        self._taken = 0
        # The present connection.
        self._phase = Phase.NONE
        self._epoch = 0
        self._is_paused = False
        self._forget_connection()

    @property
    def local_state(self) -> State:
        """How far this side's direction has come."""
        return self._states[self.role]

    @property
    def remote_state(self) -> State:
        """How far the peer's direction has come."""
        return self._states[self.role.other]

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
            and self._acked == self._said
            and not self._unreported_frames
        )

    @property
    def is_paused(self) -> bool:
        """Whether nothing more is parsed before `all_planned`."""
        return self._is_paused

    @property
    def has_window(self) -> bool:
        """Whether one more tensor may be said before the peer has taken others."""
        return self._said - self._acked < WINDOW_FRAMES and (
            self._unacked_tensors < WINDOW_TENSORS or self._unacked_bytes < WINDOW_BYTES
        )

    def add_channel(
        self, options: Sequence[Sequence[int]], is_compressed: bool = False
    ) -> int:
        """Plans a channel of tensors that the peer may send.

        Args:
          options: for each shape, the exact size of each buffer of a tensor on it.
          is_compressed: whether a buffer may be shorter, and a table says how long.

        Returns:
          The channel's number: channels count from 0 in the order they are added.
        """
        table_bytes = TABLE_ENTRY_BYTES * max(map(len, options))
        if is_compressed and table_bytes > STAGE_BYTES // 2:
            raise LocalProtocolError("too many buffers in a tensor to compress")
        self._channels.append(Plan(tuple(map(tuple, options)), is_compressed))
        return len(self._channels) - 1

    def all_planned(self) -> None:
        """Connector: channels are added, so what follows the Welcome may be read."""
        self._is_paused = False
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
        self._cursor = self._acked
        self._last_sent = self._last_received = now
        self._control.append(Open(self.session, self._epoch))

    def lost(self) -> None:
        """The connection has ended; half a frame of it is no frame."""
        self._phase = Phase.NONE
        self._forget_connection()

    def _forget_connection(self) -> None:
        self._control: collections.deque[frames.Message] = collections.deque()
        self._unreported_bytes = self._unreported_frames = 0
        self._stage = bytearray(STAGE_BYTES)
        self._stage_view = memoryview(self._stage)
        self._start_at = self._end_at = 0
        self._head: frames.Head | None = None
        self._message: tuple[bytes, list[np.ndarray]] | None = None
        self._holes: collections.deque[memoryview] = collections.deque()

    # Sending.

    def send(self, message: frames.Message) -> None:
        """Says something: `data_to_send` will return its frame when it can go.

        Raises:
          LocalProtocolError: if it may not be said now.
        """
        allowed = TRANSITIONS[self.role][self.local_state]
        if type(message) not in allowed:
            raise LocalProtocolError(
                f"cannot send {type(message).__name__} to {self.peer}"
                f" {self.local_state.value}"
            )
        self._advance(self.role, message)
        self._unacked.append(message)
        self._said += 1
        if isinstance(message, Tensor):
            self._unacked_tensors += 1
            self._unacked_bytes += sum(map(len, message.buffers))

    def abort(self, reason: str, now: float) -> list[Any]:
        """Gives up the session, whatever is still to be said.

        Returns:
          The buffers to write behind those that `data_to_send` has returned; none
          without a connection.
        """
        self._states[self.role] = State.ENDED
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
        if self._cursor < self._said:
            message = self._unacked[self._cursor - self._acked]
            self._cursor += 1
            self._ever_sent = max(self._ever_sent, self._cursor)
            return self._frame(message, self._cursor - 1, now)
        if (
            self._unreported_bytes >= ACK_BYTES
            or self._unreported_frames >= ACK_FRAMES
            or (self._unreported_frames and self.remote_state is State.ENDED)
        ):
            return self._frame(Ping(), 0, now)
        return []

    def _frame(self, message: frames.Message, sequence: int, now: float) -> list[Any]:
        buffers = frames.encode(message, sequence, self._taken)
        self._last_sent = now
        self._unreported_bytes = self._unreported_frames = 0
        self._count("sent", message, sum(map(len, buffers)))
        return buffers

    def tick(self, now: float) -> None:
        """Keeps the connection alive; to be called when `next_tick` has come.

        Raises:
          PeerGone: if the peer has been silent for longer than the timeout.
        """
        silence = now - self._last_received
        if self._phase is not Phase.NONE and silence >= self._peer_timeout:
            raise PeerGone(f"{self.peer} has been silent for {silence:.0f} s")
        if (
            self._phase is Phase.RUNNING
            and now >= self._last_sent + self._ping_interval
        ):
            self._last_sent = now
            self._control.append(Ping())

    def next_tick(self, now: float) -> float:
        """Seconds from `now` after which `tick` has something to do."""
        when = self._last_received + self._peer_timeout
        if self._phase is Phase.RUNNING:
            when = min(when, self._last_sent + self._ping_interval)
        return max(0.0, when - now)

    def not_reading(self, now: float) -> None:
        """Silence does not count while this side itself leaves bytes unread."""
        self._last_received = now

    @property
    def _ping_interval(self) -> float:
        return self._peer_timeout / PINGS_PER_TIMEOUT

    # Receiving.

    def get_buffer(self) -> memoryview:
        """Where the next bytes from the peer belong; empty only while paused."""
        return self._holes[0] if self._holes else self._stage_view[self._end_at :]

    def buffer_updated(self, count: int, now: float) -> None:
        """Takes note of `count` bytes written to the start of `get_buffer()`.

        Raises:
          RemoteProtocolError: if they break the protocol or the plan.
        """
        self._last_received = now
        if not self._holes:
            self._end_at += count
            self._parse()
            return
        hole = self._holes[0]
        if count < len(hole):
            self._holes[0] = hole[count:]
            return
        self._holes.popleft()
        if not self._holes:
            self._finish()

    @property
    def is_inside_tensor(self) -> bool:
        """Whether more bytes of a large tensor are due."""
        return bool(self._holes)

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

    def _parse(self) -> None:
        """Makes messages of what is staged, as far as it goes."""
        while not self._holes and not self._is_paused:
            if self._head is None:
                if (data := self._staged(frames.HEAD.size)) is None:
                    break
                self._head = self._checked_head(data)
            if self._message is None:
                if not self._begin_message(self._head):
                    break
                self._fill_from_stage(self._message[1])
            if not self._holes:
                self._finish()
        if self._start_at == self._end_at:
            self._start_at = self._end_at = 0
        elif self._start_at:
            rest = self._stage[self._start_at : self._end_at]
            self._stage[: len(rest)] = rest
            self._start_at, self._end_at = 0, len(rest)

    def _staged(self, count: int) -> bytes | None:
        """Takes `count` bytes off the stage; None if they are not there yet."""
        end = self._start_at + count
        if end > self._end_at:
            return None
        data = bytes(self._stage_view[self._start_at : end])
        self._start_at = end
        return data

    def _checked_head(self, data: bytes) -> frames.Head:
        try:
            head = frames.decode_head(data)
        except frames.FrameError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        name = head.kind.__name__
        if head.kind in frames.UNNUMBERED:
            if head.kind not in UNNUMBERED[self._phase]:
                raise RemoteProtocolError(
                    f"{self.peer} sent {name} {self._phase.value}"
                )
            expected = 0
        else:
            if self._phase is not Phase.RUNNING:
                raise RemoteProtocolError(
                    f"{self.peer} sent {name} {self._phase.value}"
                )
            if head.kind not in TRANSITIONS[self.role.other][self.remote_state]:
                raise RemoteProtocolError(
                    f"{self.peer} sent {name} {self.remote_state.value}"
                )
            expected = self._taken
        if head.sequence != expected:
            raise RemoteProtocolError(
                f"{self.peer} sent frame {head.sequence}; expected {expected}"
            )
        if head.kind is not Abort:  # it may come from one who knows no session
            self._take_ack(head.taken)
        return head

    def _take_ack(self, taken: int) -> None:
        """Drops what the peer has taken."""
        if not self._acked <= taken <= self._ever_sent:
            raise RemoteProtocolError(
                f"{self.peer} has taken {taken} frames; it said {self._acked} before,"
                f" and {self._ever_sent} were sent"
            )
        for _ in range(taken - self._acked):
            message = self._unacked.popleft()
            if isinstance(message, Tensor):
                self._unacked_tensors -= 1
                self._unacked_bytes -= sum(map(len, message.buffers))
        self._acked = taken
        self._cursor = max(self._cursor, taken)

    def _begin_message(self, head: frames.Head) -> bool:
        """Reads the typed header and takes memory for the payload, within the plan.

        Returns:
          False if bytes are missing yet.
        """
        start = self._start_at
        header = self._staged(head.kind.LAYOUT.size)
        if header is None:
            return False
        if head.kind is Tensor:
            sizes = self._planned_sizes(head, header)
        else:
            limits = {Hello: frames.MAX_HELLO_BYTES, Abort: frames.MAX_REASON_BYTES}
            limit = limits.get(head.kind, 0)
            if head.payload_bytes > limit:
                raise RemoteProtocolError(
                    f"{self.peer} sent {head.kind.__name__} with a payload of"
                    f" {head.payload_bytes} bytes; at most {limit}"
                )
            sizes = (head.payload_bytes,) if head.kind in limits else ()
        if sizes is None:
            self._start_at = start
            return False
        self._message = header, [aligned_empty(size) for size in sizes]
        return True

    def _planned_sizes(self, head: frames.Head, header: bytes) -> Sequence[int] | None:
        """The sizes of a tensor's buffers; None if the table is not there yet."""
        channel, _, _, option = Tensor.LAYOUT.unpack(header)
        if channel >= len(self._channels):
            raise RemoteProtocolError(
                f"{self.peer} sent a tensor on channel {channel};"
                f" {len(self._channels)} channels are agreed"
            )
        plan = self._channels[channel]
        if option >= len(plan.options):
            raise RemoteProtocolError(
                f"{self.peer} sent option {option} on channel {channel};"
                f" {len(plan.options)} are agreed"
            )
        sizes = plan.options[option]
        announced = head.payload_bytes
        if plan.is_compressed:
            table = self._staged(TABLE_ENTRY_BYTES * len(sizes))
            if table is None:
                return None
            limits, sizes = sizes, np.frombuffer(table, ">u8").tolist()
            if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
                raise RemoteProtocolError(
                    f"{self.peer} sent a table on channel {channel} that exceeds"
                    f" the plan"
                )
            announced -= len(table)
        if announced != sum(sizes):
            raise RemoteProtocolError(
                f"{self.peer} sent {head.payload_bytes} bytes on channel {channel};"
                f" the plan says {head.payload_bytes - announced + sum(sizes)}"
            )
        return sizes

    def _fill_from_stage(self, buffers: list[np.ndarray]) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            count = min(len(view), self._end_at - self._start_at)
            if count:
                end = self._start_at + count
                view[:count] = self._stage_view[self._start_at : end]
                self._start_at = end
            if count < len(view):
                self._holes.append(view[count:])

    def _finish(self) -> None:
        """A whole message is there."""
        head, (header, buffers) = self._head, self._message
        self._head = self._message = None
        try:
            message = frames.decode(head, header, buffers)
        except frames.FrameError as error:
            raise RemoteProtocolError(f"{self.peer} {error}") from None
        size = frames.HEAD.size + len(header) + head.payload_bytes
        self._count("received", message, size)
        if head.kind in frames.UNNUMBERED:
            self._phase = UNNUMBERED[self._phase][head.kind]
        else:
            self._taken += 1
            self._unreported_frames += 1
            self._unreported_bytes += size
            self._advance(self.role.other, message)
        match message:
            case Ping():
                return
            case Open():
                if (message.session, message.epoch) != (self.session, self._epoch):
                    raise RemoteProtocolError(f"{self.peer} opened another session")
                return
            case Hello():
                self.peer = message.cluster
            case Welcome():
                self._is_paused = True  # until `all_planned`
            case Abort():
                self._states[self.role.other] = State.ENDED
        self._events.append(message)

    def _advance(self, speaker: Role, message: frames.Message) -> None:
        state = self._states[speaker]
        self._states[speaker] = TRANSITIONS[speaker][state][type(message)]
        if (
            isinstance(message, Welcome)
            and self._states[Role.CONNECTOR] is State.GREETED
        ):
            self._states[Role.CONNECTOR] = State.OPEN

    def _count(self, direction: str, message: frames.Message, size: int) -> None:
        """The byte ledger: what crossed, by direction, kind and channel."""
        kind = type(message).__name__
        if isinstance(message, Tensor):
            kind = f"{kind}[{message.channel}]"
        entry = self.ledger.setdefault(f"{direction} {kind}", [0, 0])
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


def aligned_empty(size: int) -> np.ndarray:
    """[size] uint8, uninitialised, at an address that XLA can take without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size]
