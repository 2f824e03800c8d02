"""Hosts joined by lines, and the sockets of their processes, as Linux has them."""

import collections
import socket
from collections.abc import Callable
from typing import Any

from tests.simulation import world as world_lib

CAPACITY = 1 << 16  # bytes under way or unread, in one direction of a connection
BACKLOG = 128

Place = collections.deque[world_lib.Wait]


class Line:
    """What lies between two hosts, in one direction."""

    def __init__(self, latency: float, rate: float) -> None:
        """Begins whole; latency: seconds; rate: bytes per second."""
        self.latency, self.rate = latency, rate
        self.down_until = 0.0  # nothing passes before this; TCP sends it again then
        self.idle_from = 0.0  # what was sent so far has left by then, in turn
        self.refused_until = 0.0  # new connections are refused before this time
        self.flips = 0  # pieces that are still to be damaged

    def arrival(self, now: float) -> float:
        """Returns when that arrives which follows now, and has no bytes."""
        return max(now, self.down_until, self.idle_from) + self.latency

    def send(self, now: float, size: int) -> float:
        """Sends bytes after all that were sent before; returns when they arrive."""
        self.idle_from = max(now, self.down_until, self.idle_from) + size / self.rate
        return self.idle_from + self.latency


class Network:
    """All lines, listening sockets and connections."""

    def __init__(self, world: world_lib.World, line: Callable[[], Line]) -> None:
        """Makes a network whose lines are made by `line` when they are first used."""
        self.world, self._make = world, line
        self._lines: dict[tuple[str, str], Line] = {}
        self.listening: dict[str, Listening] = {}  # by host
        self.gone: set[str] = set()  # hosts that do not answer at all
        self.connections: list[tuple[Socket, Socket]] = []

    def line(self, start: str, end: str) -> Line:
        if (start, end) not in self._lines:
            self._lines[start, end] = self._make()
        return self._lines[start, end]

    def lines(self) -> list[Line]:
        """Returns all lines that were used."""
        return list(self._lines.values())

    def between(self, one: str, other: str) -> list["Socket"]:
        """Returns the open sockets of `one` whose peer is a process of `other`."""
        self.connections = [
            pair for pair in self.connections if not all(end.is_closed for end in pair)
        ]
        ends = [end for pair in self.connections for end in pair if not end.is_closed]
        return [end for end in ends if (end.host, end.peer_host) == (one, other)]

    def connect(self, host: str, timeout: float) -> "Socket":
        """Connects the running task's process to a host, or raises what Linux does."""
        world, process = self.world, self.world.process()
        there, back = self.line(process.host, host), self.line(host, process.host)
        arrives = back.arrival(there.arrival(world.now)) - world.now
        if host in self.gone or arrives > timeout:
            world.sleep((), timeout)
            raise TimeoutError("timed out")
        world.sleep((), arrives)
        listening = self.listening.get(host)
        is_refused = world.now < there.refused_until
        if listening is None or host in self.gone or is_refused:
            raise ConnectionRefusedError(111, "Connection refused")
        if len(listening.backlog) >= BACKLOG:
            world.sleep((), max(0.0, timeout - arrives))
            raise TimeoutError("timed out")
        near = Socket(self, process, there, host)
        far = Socket(self, listening.process, back, process.host)
        near.peer, far.peer = far, near
        self.connections.append((near, far))
        listening.backlog.append(far)
        world.wake_all(listening.changed)
        return near


class Descriptor:
    """What sockets have in common: a number, a timeout, and who waits for them."""

    family = socket.AF_INET

    def __init__(self, network: Network, process: world_lib.Process) -> None:
        self.network, self.process = network, process
        self.world, self.host = process.world, process.host
        self.timeout: float | None = None
        self.is_closed = False
        self.changed: Place = collections.deque()
        self._number = process.describe(self)

    def fileno(self) -> int:
        return -1 if self.is_closed else self._number

    def setblocking(self, blocks: bool) -> None:
        self.timeout = None if blocks else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds

    def setsockopt(self, *_: Any) -> None: ...

    def close(self) -> None:
        self.world.process()
        self.drop()

    def drop(self, is_gone: bool = False) -> None:
        """Closes it as the system does when a process ends."""
        if not self.is_closed:
            self.is_closed = True
            self.process.descriptors.pop(self._number, None)
            self.world.wake_all(self.changed)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Waits as the timeout of the socket has it."""
        world = self.world
        world.process()
        until = None if self.timeout is None else world.now + self.timeout
        while not is_ready():
            if self.timeout == 0.0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            left = None if until is None else until - world.now
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            world.sleep((self.changed,), left)
        if self.is_closed:
            raise OSError(9, "Bad file descriptor")


class Listening(Descriptor):
    """A listening socket, once it is bound."""

    def __init__(self, network: Network, process: world_lib.Process) -> None:
        super().__init__(network, process)
        self.backlog: collections.deque[Socket] = collections.deque()

    def bind(self, address: tuple) -> None:
        if self.host in self.network.listening:
            raise OSError(98, "Address already in use")
        self.network.listening[self.host] = self

    def listen(self, size: int) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return self.host, 7070

    def readiness(self) -> tuple[bool, bool]:
        """Returns whether it can be read, and written."""
        return bool(self.backlog) or self.is_closed, False

    def accept(self) -> tuple["Socket", tuple[str, int]]:
        self._wait(lambda: self.readiness()[0])
        sock = self.backlog.popleft()
        return sock, (sock.peer_host, 40000)

    def drop(self, is_gone: bool = False) -> None:
        if self.is_closed:
            return
        if self.network.listening.get(self.host) is self:
            del self.network.listening[self.host]
        super().drop(is_gone)
        for sock in self.backlog:
            sock.drop(is_gone)


class Socket(Descriptor):
    """One end of a connection; the bytes that come to it are kept here."""

    def __init__(
        self,
        network: Network,
        process: world_lib.Process,
        line: Line | None,
        peer_host: str,
    ) -> None:
        """Makes an end; line: to the peer; None for one in the same process."""
        super().__init__(network, process)
        self.peer: Socket
        self.peer_host, self._line = peer_host, line
        self._arrived = bytearray()
        self._under_way = 0  # bytes to here
        self._latest = 0.0  # when the newest byte from here arrives
        self._low_water = 1
        self._error: OSError | None = None
        self.is_deaf = False
        """True if nothing reaches this end any more, and nobody gets to know."""
        self._is_gone = False
        self._at_end = self._has_ended = False  # received, sent an end of stream

    # As production code calls it.

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option == socket.SO_RCVLOWAT:
            self._low_water = value
            self.world.wake_all(self.changed)

    def readiness(self) -> tuple[bool, bool]:
        """Returns whether it can be read, and written."""
        broken = self._error is not None or self.is_closed
        reads = broken or self._at_end or len(self._arrived) >= self._low_water
        return reads, broken or self._has_ended or self.peer.held() < CAPACITY

    def held(self) -> int:
        """Returns the bytes on their way to here or unread."""
        return self._under_way + len(self._arrived)

    def send(self, data: Any) -> int:
        world = self.world
        self._wait(lambda: self.readiness()[1])
        if self._error is not None or self._has_ended:
            raise self._error or BrokenPipeError(32, "Broken pipe")
        data = bytes(memoryview(data)[: CAPACITY - self.peer.held()])
        if self._line is None:
            self.peer.arrive(data)
            return len(data)
        self.peer._under_way += len(data)
        self._latest = max(self._latest, self._line.send(world.now, len(data)))
        world.at(self._latest, self.peer.arrive, data)
        world.give_way()
        return len(data)

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.send(view) :]

    def recv_into(self, view: Any) -> int:
        if not len(view):
            return 0
        self._wait(lambda: bool(self._arrived) or self.readiness()[0])
        if self._error is not None:
            raise self._error
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        if count:
            self.world.wake_all(self.peer.changed)
        return count

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        count = self.recv_into(memoryview(data))
        return bytes(data[:count])

    def shutdown(self, how: int) -> None:
        self.world.process()
        if self._error is not None or self.is_closed:
            raise OSError(107, "Transport endpoint is not connected")
        self._end_stream()
        if how == socket.SHUT_RDWR:
            self._at_end = True
            self.world.wake_all(self.changed)

    def drop(self, is_gone: bool = False) -> None:
        if self.is_closed:
            return
        super().drop(is_gone)
        if is_gone:
            self._is_gone = self.peer.is_deaf = True
        elif self._arrived:  # nobody has read it: the peer gets a reset
            self._reset_peer()
        else:
            self._end_stream()

    # What comes from the line.

    def arrive(self, data: bytes) -> None:
        if self._line is not None:
            if self._is_gone and self.host not in self.network.gone:
                self.peer.is_deaf = False  # there is somebody who answers again
            elif self.is_deaf or self._is_gone:
                return  # and nobody acknowledges it
            self._under_way -= len(data)
            back = self.peer._line
            if back is not None and back.flips and data:
                back.flips -= 1
                place = self.world.random.randrange(8 * len(data))
                changed = bytearray(data)
                changed[place // 8] ^= 1 << place % 8
                data = bytes(changed)
        if self._error is not None:
            return
        if self.is_closed or self._at_end:
            self._reset_peer()
            return
        self._arrived += data
        self.world.wake_all(self.changed)

    def fail(self, error: OSError) -> None:
        """Breaks this end: a reset has come."""
        if not self.is_deaf and self._error is None:
            self._error = error
            self._arrived.clear()
            self.world.wake_all(self.changed)

    def reset(self) -> None:
        """Breaks both ends, as a middlebox that lost its table."""
        for end in (self, self.peer):
            end.fail(ConnectionResetError(104, "Connection reset by peer"))

    def _reset_peer(self) -> None:
        self._later(self.peer.fail, ConnectionResetError(104, "Connection reset"))

    def _end_stream(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._later(self.peer._finish)

    def _finish(self) -> None:
        if not self.is_deaf:
            self._at_end = True
            self.world.wake_all(self.changed)

    def _later(self, function: Callable[..., None], *args: Any) -> None:
        """Does something when all that was sent before has arrived."""
        if self._line is None:
            function(*args)
            return
        now = self.world.now
        self._latest = max(self._latest, self._line.arrival(now))
        self.world.at(self._latest, function, *args)
