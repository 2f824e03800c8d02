"""A connection between two switches: many streams, in turn by their shares.

Its messages, in bytes:

    offset  bytes  field
         0      1  kind: CONTROL, DATA, CREDIT, CLOSE
         1      3  length of what follows the head
         4      4  stream; 0 for the line itself

A control message is a JSON object, data are bytes of a stream, a credit lets the other
side send so many bytes more on a stream, and a close, without any, ends a stream.

Control messages go before all data. Each stream may have WINDOW_BYTES in flight that
the other switch has not passed on, so that one whose trainer is slow holds up no other.
The kernel keeps little that is unsent: what is urgent waits for few bytes. With a
connection for each stream it would share the line: of weights 3 and 1 it made 1 and 1.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import shares
from nebula_jax.security.tls import between_labs

CONTROL, DATA, CREDIT, CLOSE = 1, 2, 3, 4
HEAD = struct.Struct("!II")
CHUNK_BYTES = 60 << 10  # of a message: others soon get turns, even on a slow line
MOST_BYTES = {CONTROL: 1 << 20, DATA: CHUNK_BYTES, CREDIT: 4, CLOSE: 0}
_CREDIT = struct.Struct("!I")
WINDOW_BYTES = 4 << 20  # 1 Gbit/s over a round trip of 30 ms
UNSENT_BYTES = 128 << 10  # in the kernel, before a write waits
BUFFER_BYTES = 64 << 10  # in the process
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # without a byte, after which a line counts as broken
MOST_STREAMS = 128  # of both sides: with a window each way, a line holds 1 GiB at most
MOST_URGENT = 4 << 20
"""Bytes of urgent messages that may wait: revocation lists, of 512 KiB at most, and
heads of logs. A switch that reads none of them shall not fill this one's memory."""


class LineEnded(errors.NebulaError):
    """A line that was closed, with the reason."""


class Full(errors.NebulaError):
    """A line that has as many streams as it may."""


class Connection(NamedTuple):
    """A TLS connection between two switches, after its handshake."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: between_labs.Peer | None  # None if the other side has shown no certificate


def encode(kind: int, stream: int, data: bytes = b"") -> bytes:
    """Returns the bytes of a message."""
    return HEAD.pack(kind << 24 | len(data), stream) + data


def read_head(data: bytes) -> tuple[int, int, int]:
    """Reads kind, stream and length; raises json_lines.Malformed if they cannot be."""
    word, stream = HEAD.unpack(data)
    kind, length = word >> 24, word & 0xFFFFFF
    if length > MOST_BYTES.get(kind, -1):
        raise json_lines.Malformed(f"a message of kind {kind} and {length} bytes")
    return kind, stream, length


def read_credit(data: bytes) -> int:
    """Reads a credit; raises json_lines.Malformed if it is none."""
    if len(data) != _CREDIT.size:
        raise json_lines.Malformed("a credit that cannot be read")
    return int(_CREDIT.unpack(data)[0])


class Stream:
    """One stream of a line, between a trainer here and one there."""

    def __init__(self, line: "Line | _Loop", number: int) -> None:
        self.line, self.number = line, number
        self.has_ended = False
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[errors.NebulaError | None] = loop.create_future()
        self._credit = WINDOW_BYTES  # bytes that may still be sent
        self._left_here = 0  # bytes that have left, and are not credited yet
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._taken = 0  # bytes passed on, not yet credited to the other side
        self._here = 0  # bytes received and not passed on
        self._received = bytearray()  # however small the pieces are that came
        self._has_more = asyncio.Event()
        self.is_held = True  # True until closed here: what has come may wait

    async def opened(self) -> None:
        """Waits until the other lab has opened it; raises a refusal, or LineEnded."""
        if (refusal := await self._answer) is not None:
            raise refusal

    def answer(self, refusal: errors.NebulaError | None = None) -> None:
        """Takes the other lab's answer: that it refuses, or has opened the stream."""
        if not self._answer.done():
            self._answer.set_result(refusal)

    async def send(self, data: bytes) -> None:
        """Queues data, once there is room; raises LineEnded if the stream has ended."""
        await self._may_send.wait()
        if self.has_ended:
            raise LineEnded(self.line.reason)
        self._credit -= len(data)
        if self._credit <= 0:
            self._may_send.clear()
        self.line._put(self.number, data)

    async def receive(self) -> bytes:
        """Waits for data; returns none at the stream's end."""
        if not (self._received or self.has_ended):
            self._has_more.clear()
            await self._has_more.wait()
        data = bytes(self._received[:CHUNK_BYTES])
        del self._received[:CHUNK_BYTES]
        return data

    def passed_on(self, count: int) -> None:
        """Lets the other side send as much again as was passed on."""
        self._here -= count
        self._taken += count
        if self._taken >= WINDOW_BYTES // 4 and not self.has_ended:
            self.line._credit(self.number, self._taken)
            self._taken = 0

    def close(self, at_once: bool = False) -> None:
        """Ends the stream on both sides; drops what is queued if `at_once`."""
        if not self.has_ended:
            self._end()
            # The reason stays in this lab: it may name an account, or a path here.
            self.line._close(self.number, at_once)
        self.is_held = False
        self._received.clear()

    def _take(self, data: bytes) -> None:
        self._here += len(data)
        if self._here > WINDOW_BYTES + CHUNK_BYTES:
            raise json_lines.Malformed(f"stream {self.number} overran its window")
        self._received += data
        self._has_more.set()

    def _leave(self, count: int) -> None:
        self._left_here += count

    def _give(self, count: int) -> None:
        # Else a peer that reads nothing could have this switch queue without end.
        if count > self._left_here:
            raise json_lines.Malformed(
                f"stream {self.number} was given more than it sent"
            )
        self._left_here -= count
        self._credit += count
        if self._credit > 0:
            self._may_send.set()

    def _end(self) -> None:
        self.has_ended = True
        self.answer(LineEnded(self.line.reason))
        self._may_send.set()
        self._has_more.set()


class Line:
    """A TLS connection to the switch of another lab."""

    def __init__(
        self,
        connection: Connection,
        *,
        is_dialer: bool,
        beat: Callable[[], Mapping[str, Any]],
        receive: Callable[["Line", Mapping[str, Any]], None],
    ) -> None:
        """Takes over a connection that has been checked; `run` moves it.

        `beat` returns a heartbeat's fields; `receive` is called with control messages.
        """
        self._reader, self._writer, peer = connection
        assert peer is not None  # else it is no other lab's
        self.lab, _, self.serial, self.begin, self.end = peer
        self.streams: dict[int, Stream] = {}
        self._held: list[Stream] = []  # those, and others of which bytes wait here
        self.bytes_sent = self.bytes_received = 0
        self.since = time.time()
        self.clock_ahead = 0.0  # seconds by which this clock is ahead of the other's
        self.is_dialer = is_dialer
        self.wants_successor = asyncio.Event()  # set to reconnect with new certificates
        self.ended = asyncio.Event()  # set once nothing moves any more
        self._numbers = itertools.count(1 if is_dialer else 2, 2)
        self._parity = 0 if is_dialer else 1  # of the other side's streams
        self._beat, self._receive = beat, receive
        self._shares = shares.Shares()
        self._first: collections.deque[bytes] = collections.deque()
        self._first_bytes = 0
        self._changed = asyncio.Event()
        self.reason = ""  # the reason for its end, once it has ended
        self._writer.transport.set_write_buffer_limits(BUFFER_BYTES, BUFFER_BYTES // 4)
        sock = self._writer.get_extra_info("socket")
        if sock is None:  # it has ended while its peer was checked: `run` notices
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self) -> str:
        """Moves messages until the line ends; returns the reason for its end."""
        tasks = [
            asyncio.create_task(each)
            for each in (self._read(), self._write(), self._keep_alive())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for error in ends:
                if isinstance(error, Exception):
                    self.reason = self.reason or _words(error)
            self._end_all()
        return self.reason

    def close(self, reason: str) -> None:
        """Ends the line at once, and all of its streams."""
        self.reason = self.reason or reason
        self._writer.transport.abort()
        self._end_all()

    def renew(self) -> None:
        """Has another connection take the place of this one, made by who dialed."""
        if self.is_dialer:
            self.wants_successor.set()
        else:
            self.send(op="renew")

    @property
    def is_closed(self) -> bool:
        """True if nothing moves any more."""
        return self.ended.is_set()

    def send(self, **fields: Any) -> None:
        """Sends a control message, before all data."""
        data = json.dumps(fields, separators=(",", ":")).encode()
        self._urgent(encode(CONTROL, 0, data))

    def open(self) -> Stream:
        """Begins a stream, not announced yet; raises Full if there are too many."""
        return self._add(next(self._numbers))

    def accept(self, number: int) -> Stream:
        """Takes an announced stream; raises Malformed if not new, Full if too many."""
        if number % 2 != self._parity or number <= 0 or number in self.streams:
            raise json_lines.Malformed(f"announced stream {number}")
        return self._add(number)

    def share(self, stream: Stream, account: str, weight: float) -> None:
        """Lets a stream send, by the share of its account."""
        self._shares.add(stream.number, account, weight)

    def _add(self, number: int) -> Stream:
        queued = self._shares
        held = [each for each in self._held if each.is_held or each.number in queued]
        self._held = held
        if len(self._held) >= MOST_STREAMS:
            raise Full(f"the line to {self.lab} has {MOST_STREAMS} streams at present")
        self.streams[number] = stream = Stream(self, number)
        self._held.append(stream)
        return stream

    # What its streams send.

    def _put(self, number: int, data: bytes) -> None:
        self._shares.put(number, encode(DATA, number, data))
        self._changed.set()

    def _credit(self, number: int, count: int) -> None:
        self._urgent(encode(CREDIT, number, _CREDIT.pack(count)))

    def _urgent(self, message: bytes) -> None:
        self._first.append(message)
        self._first_bytes += len(message)
        if self._first_bytes > MOST_URGENT and not self.is_closed:
            self.close("the other switch takes nothing that is urgent")
        self._changed.set()

    def _close(self, number: int, at_once: bool) -> None:
        self.streams.pop(number, None)
        message = encode(CLOSE, number)
        if at_once or number not in self._shares:
            self._shares.remove(number)
            self._urgent(message)
        else:
            self._shares.put(number, message)
            self._shares.remove_when_empty(number)
            self._changed.set()

    def _end_all(self) -> None:
        self.ended.set()
        self._changed.set()
        for stream in list(self.streams.values()):
            stream._end()
        self.streams.clear()
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()

    async def _read(self) -> None:
        while True:
            head = await self._exactly(HEAD.size)
            kind, number, length = read_head(head)
            data = await self._exactly(length)
            self.bytes_received += len(head) + length
            if kind == CONTROL:
                self._receive(self, json_lines.decode(data))
                continue
            stream = self.streams.get(number)
            if kind == CLOSE:
                self._shares.remove(number)  # of one that has ended here, too
                self.streams.pop(number, None)
            if stream is None:
                continue  # it has ended here
            if kind == DATA:
                stream._take(data)
            elif kind == CREDIT:
                stream._give(read_credit(data))
            else:
                stream._end()

    async def _exactly(self, count: int) -> bytes:
        """Reads so many bytes; however slowly they come, they are no silence."""
        data = bytearray()
        while len(data) < count:
            async with asyncio.timeout(SILENCE_SECONDS):
                piece = await self._reader.read(count - len(data))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(data), count)
            data += piece
        return bytes(data)

    async def _write(self) -> None:
        writer = self._writer
        while not self.is_closed:
            if self._first:
                message = self._first.popleft()
                self._first_bytes -= len(message)
            elif (turn := self._shares.next()) is not None:
                message = turn
                kind, number, length = read_head(message[: HEAD.size])
                if kind == DATA and number in self.streams:
                    self.streams[number]._leave(length)
            else:
                self._changed.clear()
                await self._changed.wait()
                continue
            writer.write(message)
            self.bytes_sent += len(message)
            await writer.drain()

    async def _keep_alive(self) -> None:
        while True:
            self.send(op="beat", **self._beat())
            await asyncio.sleep(BEAT_SECONDS)


class _Loop:
    """A line within a lab: what one of its two streams sends, the other receives."""

    reason = ""

    def __init__(self) -> None:
        self.ends = Stream(self, 0), Stream(self, 1)

    def _put(self, number: int, data: bytes) -> None:
        self.ends[number]._leave(len(data))
        self.ends[1 - number]._take(data)

    def _credit(self, number: int, count: int) -> None:
        self.ends[1 - number]._give(count)

    def _close(self, number: int, at_once: bool) -> None:
        self.ends[1 - number]._end()


def local_pair() -> tuple[Stream, Stream]:
    """Returns both ends of a stream between two trainers of this lab."""
    return _Loop().ends


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the other switch closed the line"
    if isinstance(error, TimeoutError):
        return f"nothing came for {SILENCE_SECONDS:.0f} s"
    return between_labs.in_words(error) or type(error).__name__
