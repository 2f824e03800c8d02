"""One side of a conversation between two clusters, without any I/O.

A caller moves bytes and asks what they mean:

    for buffer in connection.send(message, now): ...write it...
    view = connection.get_buffer()           # where the next bytes belong
    n = sock.recv_into(view)
    connection.buffer_updated(n, now)
    while (message := connection.next_event()) is not None: ...

Bytes of a tensor land in the aligned buffers that will be handed to the device: there
is no copy in between. Time is an argument: seconds on any clock that only goes forward.

Everything that decides which message may come when is in TRANSITIONS.
"""

import collections
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nebula_jax import errors
from nebula_jax.communication import frames
from nebula_jax.communication.frames import (
    Abort,
    End,
    Hello,
    Ping,
    StepDone,
    Stop,
    Tensor,
    Welcome,
)

ALIGNMENT = 64  # bytes; XLA takes a host buffer as it is only if aligned so
PINGS_PER_TIMEOUT = 4  # a peer is heard of this often before it counts as gone


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
        State.START: {Hello: State.GREETED, Abort: State.ENDED},
        State.GREETED: {
            Ping: State.GREETED,
            Welcome: State.OPEN,
            Abort: State.ENDED,
        },
        State.OPEN: {
            Tensor: State.OPEN,
            StepDone: State.OPEN,
            Stop: State.OPEN,
            Ping: State.OPEN,
            End: State.ENDED,
            Abort: State.ENDED,
        },
        State.ENDED: {},
    },
    Role.CONNECTOR: {
        State.START: {Hello: State.GREETED, Abort: State.ENDED},
        State.GREETED: {Ping: State.GREETED, Abort: State.ENDED},
        State.OPEN: {
            Tensor: State.OPEN,
            Stop: State.OPEN,
            Ping: State.OPEN,
            End: State.ENDED,
            Abort: State.ENDED,
        },
        State.ENDED: {},
    },
}


class Connection:
    """The state of one conversation."""

    def __init__(self, role: Role, peer_timeout: float, now: float):
        """Starts before any message.

        Args:
          role: of this side.
          peer_timeout: seconds of silence after which the peer counts as gone.
          now: seconds.
        """
        self.role = role
        self.peer = "the peer"
        self._peer_timeout = peer_timeout
        self._states = {Role.LISTENER: State.START, Role.CONNECTOR: State.START}
        self._sent = self._received = 0
        self._last_sent = self._last_received = now
        self._channels: list[Sequence[int]] = []
        self._events: collections.deque[frames.Message] = collections.deque()
        self._parser = self._parse()
        self._view = next(self._parser)
        self.ledger: dict[str, list[int]] = {}

    @property
    def local_state(self) -> State:
        """How far this side's direction has come."""
        return self._states[self.role]

    @property
    def remote_state(self) -> State:
        """How far the peer's direction has come."""
        return self._states[self.role.other]

    def add_channel(self, buffer_bytes: Sequence[int]) -> int:
        """Plans a channel of tensors that the peer may send.

        Args:
          buffer_bytes: the exact size of each buffer of a tensor on it.

        Returns:
          The channel's number: channels count from 0 in the order they are added.
        """
        self._channels.append(tuple(buffer_bytes))
        return len(self._channels) - 1

    # Sending.

    def send(self, message: frames.Message, now: float) -> list[Any]:
        """Says something.

        Returns:
          The buffers to write, in order.

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
        buffers = frames.encode(message, self._sent)
        self._sent += 1
        self._last_sent = now
        self._count("sent", message, sum(len(part) for part in buffers))
        return buffers

    def tick(self, now: float) -> list[Any]:
        """Keeps the conversation alive; to be called when `next_tick` has come.

        Returns:
          The buffers of a Ping, or none.

        Raises:
          PeerGone: if the peer has been silent for longer than the timeout.
        """
        if self.remote_state is not State.ENDED:
            silence = now - self._last_received
            if silence >= self._peer_timeout:
                raise PeerGone(f"{self.peer} has been silent for {silence:.0f} s")
        can_ping = Ping in TRANSITIONS[self.role][self.local_state]
        if can_ping and now >= self._last_sent + self._ping_interval:
            return self.send(Ping(), now)
        return []

    def next_tick(self, now: float) -> float:
        """Seconds from `now` after which `tick` has something to do."""
        times = []
        if self.remote_state is not State.ENDED:
            times.append(self._last_received + self._peer_timeout)
        if Ping in TRANSITIONS[self.role][self.local_state]:
            times.append(self._last_sent + self._ping_interval)
        return max(0.0, min(times) - now) if times else self._peer_timeout

    def not_reading(self, now: float) -> None:
        """Silence does not count while this side itself leaves bytes unread."""
        self._last_received = now

    @property
    def _ping_interval(self) -> float:
        return self._peer_timeout / PINGS_PER_TIMEOUT

    # Receiving.

    def get_buffer(self) -> memoryview:
        """Where the next bytes from the peer belong; never empty."""
        return self._view

    def buffer_updated(self, count: int, now: float) -> None:
        """Takes note of `count` bytes written to the start of `get_buffer()`.

        Raises:
          RemoteProtocolError: if they break the protocol or the plan.
        """
        self._last_received = now
        self._view = self._view[count:]
        while not len(self._view):
            self._view = next(self._parser)

    def receive_data(self, data: bytes, now: float) -> None:
        """Takes bytes from anywhere: `get_buffer` and `buffer_updated` with a copy."""
        data = memoryview(data)
        while len(data):
            view = self.get_buffer()
            count = min(len(view), len(data))
            view[:count] = data[:count]
            self.buffer_updated(count, now)
            data = data[count:]

    def receive_eof(self) -> None:
        """The connection was closed by the peer.

        Raises:
          PeerGone: unless it had said End or Abort before.
        """
        if self.remote_state is not State.ENDED:
            raise PeerGone(f"{self.peer} closed the connection without a goodbye")

    def next_event(self) -> frames.Message | None:
        """The next whole message from the peer, or None."""
        return self._events.popleft() if self._events else None

    def _parse(self) -> Iterator[memoryview]:
        """Yields buffers to be filled, one after the other, for ever."""
        head_bytes = bytearray(frames.HEAD.size)
        while True:
            yield memoryview(head_bytes)
            try:
                head = frames.decode_head(bytes(head_bytes))
            except frames.FrameError as error:
                raise RemoteProtocolError(f"{self.peer} {error}") from None
            allowed = TRANSITIONS[self.role.other][self.remote_state]
            if head.kind not in allowed:
                raise RemoteProtocolError(
                    f"{self.peer} sent {head.kind.__name__} {self.remote_state.value}"
                )
            if head.sequence != self._received:
                raise RemoteProtocolError(
                    f"{self.peer} sent frame {head.sequence}; expected {self._received}"
                )
            header = bytearray(head.kind.LAYOUT.size)
            if header:
                yield memoryview(header)
            # Only now, with the announced length checked, is memory taken.
            buffers = [
                aligned_empty(size) for size in self._buffer_bytes(head, bytes(header))
            ]
            for buffer in buffers:
                if buffer.size:
                    yield memoryview(buffer)
            try:
                message = frames.decode(head, bytes(header), buffers)
            except frames.FrameError as error:
                raise RemoteProtocolError(f"{self.peer} {error}") from None
            self._received += 1
            self._advance(self.role.other, message)
            if isinstance(message, Hello):
                self.peer = message.cluster
            size = frames.HEAD.size + len(header) + head.payload_bytes
            self._count("received", message, size)
            self._events.append(message)

    def _buffer_bytes(self, head: frames.Head, header: bytes) -> Sequence[int]:
        """The sizes of the payload's buffers, checked against the plan."""
        if head.kind is Tensor:
            channel = Tensor.LAYOUT.unpack(header)[0]
            if channel >= len(self._channels):
                raise RemoteProtocolError(
                    f"{self.peer} sent a tensor on channel {channel};"
                    f" {len(self._channels)} channels are agreed"
                )
            planned = self._channels[channel]
            if head.payload_bytes != sum(planned):
                raise RemoteProtocolError(
                    f"{self.peer} sent {head.payload_bytes} bytes on channel"
                    f" {channel}; the plan says {sum(planned)}"
                )
            return planned
        limit = {Hello: frames.MAX_HELLO_BYTES, Abort: frames.MAX_REASON_BYTES}
        if head.payload_bytes > limit.get(head.kind, 0):
            raise RemoteProtocolError(
                f"{self.peer} sent {head.kind.__name__} with a payload of"
                f" {head.payload_bytes} bytes; at most {limit.get(head.kind, 0)}"
            )
        return [head.payload_bytes] if head.kind in limit else []

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


def aligned_empty(size: int) -> np.ndarray:
    """[size] uint8, uninitialised, at an address that XLA can take without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
