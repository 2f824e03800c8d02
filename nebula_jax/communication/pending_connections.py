"""Pending connections: those whose session is not known yet.

Anybody can connect, and stay silent. So their number has a bound. A connection beyond
the bound takes the place of the oldest one of the address that has the most: a flood
drives out itself.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import greeting, wakeups
from nebula_jax.security import tls as tls_lib

MOST = 1024  # at a time; fewer where a process may not have so many files
KEPT = 8  # places of each known peer's address that no other address takes
SUBNET_BITS = 64  # of an IPv6 address: the rest is the owner's to choose
LOG_BURST, LOG_SECONDS = 20, 3.0  # lines that need not wait; between the others
MAX_ACCEPTED = 64  # at a time, before those that are there go on
TURN_SECONDS = 0.05  # of work before pending connections are put in order again
RETRY_SECONDS = 0.2  # after the system refused a connection
LONGEST_SLEEP = 60.0  # seconds
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclasses.dataclass(eq=False)
class Pending:
    """One connection."""

    connected: greeting.Connected
    host: str
    deadline: float  # seconds on the caller's clock
    steps: greeting.Steps[None] = dataclasses.field(init=False)  # what is left to do
    is_expected: bool = False  # True if it has shown a call sign or certificate
    has_begun: bool = False  # True if its next step may be an expensive one, of TLS
    is_taken: bool = False  # True if a link has its socket

    def __post_init__(self) -> None:
        """Finds the descriptor, which TLS keeps, and the group of the address."""
        self.fd = self.sock.fileno()
        self.group = group(self.host)

    @property
    def sock(self) -> socket.socket:
        """The socket, which TLS wraps once it has begun."""
        return self.connected.sock


class Pool:
    """The pending connections of a listener, from the oldest on."""

    def __init__(self, most: int) -> None:
        """Starts without any; there may be `most` at a time."""
        self._most = most
        self._groups: dict[str, dict[Pending, None]] = {}  # sets that keep their order
        self._all: dict[Pending, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, pending: object) -> bool:
        return pending in self._all

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._all))

    @property
    def oldest(self) -> Pending | None:
        """The one that has been here for longest."""
        return next(iter(self._all), None)

    @property
    def is_full(self) -> bool:
        """True if one has to go before another one comes."""
        return len(self._all) >= self._most

    def add(self, pending: Pending) -> None:
        """Adds the newest one."""
        self._count += 1
        self._all[pending] = self._count
        self._groups.setdefault(pending.group, {})[pending] = None

    def remove(self, pending: Pending) -> None:
        """Removes one."""
        del self._all[pending]
        members = self._groups[pending.group]
        del members[pending]
        if not members:
            del self._groups[pending.group]

    def to_go(self, known: Collection[str]) -> Pending | None:
        """Returns the one to close for another, if any; `known` are peers' groups."""
        if not self._groups:
            return None

        def burden(group: str) -> tuple[bool, int]:
            count = len(self._groups[group])
            return group not in known or count > KEPT, count

        members = self._groups[max(self._groups, key=burden)]
        strangers = (each for each in members if not each.is_expected)
        return next(strangers, next(iter(members)))

    def in_turn(
        self, ready: Collection[Pending], known: Collection[str]
    ) -> list[Pending]:
        """Returns the ready connections in the order in which to serve them.

        First expected ones; then those that have not begun, which are cheap and may
        show that they are expected; then those of `known` groups, of the peers of
        sessions; then the address with the fewest. Of one address the newest: in a
        flood the oldest ones have given up.
        """

        def rank(pending: Pending) -> tuple[bool, bool, bool, int, int]:
            return (
                not pending.is_expected,
                pending.has_begun,
                pending.group not in known,
                len(self._groups[pending.group]),
                -self._all[pending],
            )

        return sorted(ready, key=rank)


def most() -> int:
    """Returns how many there may be: half of a process's files at most."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)


def group(host: str) -> str:
    """Returns what stands for all addresses of one owner: for IPv6, its subnet.

    >>> group("2001:db8::7:1"), group("::ffff:10.0.0.1"), group("10.0.0.1")
    ('2001:db8::', '10.0.0.1', '10.0.0.1')
    """
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    free = 128 - SUBNET_BITS
    return str(ipaddress.IPv6Address(int(address) >> free << free))


class Allowance:
    """A bound on what happens: a few times, then once in a while."""

    def __init__(self, burst: int, period: float) -> None:
        """Starts with `burst` times that need not wait; others take `period` s."""
        self._burst, self._period = burst, period
        self._left, self._now = float(burst), 0.0

    def take(self, now: float) -> bool:
        """Returns True if it may happen now; then it counts."""
        refilled = self._left + (now - self._now) / self._period
        self._left, self._now = min(self._burst, refilled), now
        may = self._left >= 1
        self._left -= may
        return may

    def spend(self, count: int) -> None:
        """Counts what has happened anyway: what follows waits for it, too."""
        self._left -= count


class RejectedLog:
    """The log of connections that came to nothing: a line each, or one for very many.

    What anybody can cause must not fill a disk. After the first few there is a line in
    a while, with how many others it stands for. Time is an argument.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        burst: int = LOG_BURST,
        period: float = LOG_SECONDS,
    ) -> None:
        """Starts with nothing counted."""
        self._log, self._allowed, self._others = log, Allowance(burst, period), 0

    def add(self, line: str, now: float) -> int | None:
        """Logs a line and returns for how many others it stands, or counts it: None."""
        if not self._allowed.take(now):
            self._others += 1
            return None
        others, self._others = self._others, 0
        self._log(f"{line} (and {others} others before it)" if others else line)
        return others

    def flush(self) -> None:
        """Logs the count of what was not logged."""
        if self._others:
            self._log(f"and {self._others} more connections like these")
        self._others = 0


class Acceptor:
    """A thread that takes all connections at a port, and waits for none of them."""

    def __init__(
        self,
        listening: socket.socket,
        steps: Callable[[Pending], greeting.Steps[None]],
        seconds: float,
        *,
        first: int = selectors.EVENT_READ,
        known: Callable[[], Collection[str]] = tuple,
        dropped: Callable[[str, float], object] = lambda line, now: None,
    ) -> None:
        """Starts to take connections from `listening`, closed with the acceptor.

        `steps` makes the steps of a connection, which may take `seconds`, and of which
        the first waits for the event `first`. The connection is closed after them,
        unless they have set its `is_taken`. `known` returns the groups of the addresses
        of known peers, which go first; `dropped` is called with a line when a
        connection is dropped, and the time.
        """
        self.pending = Pool(most())
        self.is_closed = False
        self._listening, self._steps, self._seconds = listening, steps, seconds
        self._first, self._known, self._dropped = first, known, dropped
        self._waker = wakeups.Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._selector.register(listening, selectors.EVENT_READ)
        listening.setblocking(False)
        listening.listen(endpoints.BACKLOG)  # it may be another process's, with less
        self._thread = threading.Thread(target=self._run, name="acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more connections, and closes the pending ones."""
        self.is_closed = True
        self._waker.wake()
        self._thread.join()
        for pending in self.pending:
            self._forget(pending)
        self._selector.close()
        self._waker.close()
        self._listening.close()

    def _run(self) -> None:
        while not self.is_closed:
            try:
                self._turn()
            except Exception as error:  # as of a log that fails: peers must get in
                time.sleep(RETRY_SECONDS)
                with contextlib.suppress(Exception):
                    self._dropped(f"the port goes on after {error!r}", time.monotonic())

    def _turn(self) -> None:
        ready = []
        for key, _ in self._selector.select(self._sleep()):
            if key.fileobj is self._waker:
                self._waker.clear()
            elif key.fileobj is self._listening:
                self._accept()
            else:
                ready.append(key.data)
        now = time.monotonic()
        while (oldest := self.pending.oldest) and oldest.deadline <= now:
            self._drop(oldest, f"no session within {self._seconds:g} s")
        # The next steps of those that can; the rest is ready next time.
        ready = [each for each in ready if each in self.pending]
        for pending in self.pending.in_turn(ready, self._known()):
            self._advance(pending)
            if time.monotonic() > now + TURN_SECONDS:
                return

    def _sleep(self) -> float:
        oldest = self.pending.oldest
        if oldest is None:
            return LONGEST_SLEEP
        return max(0.0, min(LONGEST_SLEEP, oldest.deadline - time.monotonic()))

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                sock, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it went again, or the system has no more
                if error.errno not in OUT_OF_FILES:
                    continue
                if not self._make_room():
                    time.sleep(RETRY_SECONDS)
                continue
            if self.pending.is_full:
                self._make_room()
            deadline = time.monotonic() + self._seconds
            connected = greeting.Connected(greeting.set_up(sock))
            pending = Pending(connected, address[0], deadline)
            pending.steps = self._steps(pending)
            self.pending.add(pending)
            self._selector.register(pending.fd, self._first, pending)

    def _make_room(self) -> bool:
        pending = self.pending.to_go(self._known())
        if pending is not None:
            self._drop(pending, "too many others had come")
        return pending is not None

    def _advance(self, pending: Pending) -> None:
        try:
            self._selector.modify(pending.fd, next(pending.steps), pending)
        except StopIteration:
            self._forget(pending)
        except Exception as error:  # whatever one connection raises, others may come
            self._drop(pending, tls_lib.in_words(error))

    def _drop(self, pending: Pending, why: str) -> None:
        line = f"dropped a connection from {pending.host}: {why}"
        try:  # the reason is in the log before the peer can notice
            self._dropped(line, time.monotonic())
        finally:
            self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        """Makes a pending none; closes its socket unless something else has it."""
        self.pending.remove(pending)
        self._selector.unregister(pending.fd)
        pending.steps.close()
        if not pending.is_taken:
            pending.sock.close()
