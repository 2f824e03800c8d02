"""Pending connections: those whose session is not known yet.

Anybody can connect, and stay silent. So their number has a bound. A connection beyond
the bound takes the place of the oldest one of the address that has the most: a flood
drives out itself. Time and sockets are the caller's.
"""

import dataclasses
import ipaddress
import resource
import socket
from collections.abc import Callable, Collection, Iterator

from nebula_jax.communication.wire import greeting

MOST = 1024  # at a time; fewer where a process may not have so many files
KEPT = 8  # places of each known peer's address that no other address takes
SUBNET_BITS = 64  # of an IPv6 address: the rest is the owner's to choose
LOG_BURST, LOG_SECONDS = 20, 3.0  # lines that need not wait; between the others


@dataclasses.dataclass(eq=False)
class Pending:
    """One connection."""

    connected: greeting.Connected
    host: str
    deadline: float
    """Seconds on the caller's clock."""
    steps: greeting.Steps[None] = dataclasses.field(init=False)
    """The rest of what is done with it."""
    is_expected: bool = False
    """True if it has shown the call sign of a session, or a certificate."""
    has_begun: bool = False
    """True if its next step may be an expensive one, of TLS."""
    is_taken: bool = False
    """True if a link has its socket."""

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
        """Returns the one to close so that another one can come, if there is any.

        `known` has the groups of the peers of sessions.
        """
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
        show that they are expected; then known peers' addresses, then the address with
        the fewest. Of one address the newest: in a flood the oldest ones have given up.

        Args:
          ready: some of them.
          known: groups of the peers of sessions.
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


class RejectedLog:
    """The log of connections that came to nothing: a line each, or one for very many.

    What anybody can cause must not fill a disk. After the first few there is a line in
    a while, with how many others it stands for. Time is an argument, as above.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        burst: int = LOG_BURST,
        period: float = LOG_SECONDS,
    ) -> None:
        """Starts with nothing counted.

        Args:
          log: called with a line.
          burst: lines that need not wait.
          period: seconds to wait for each of the others.
        """
        self._log, self._burst, self._period = log, burst, period
        self._left, self._now, self._others = float(burst), 0.0, 0

    def add(self, line: str, now: float) -> int | None:
        """Logs a line, or counts it.

        Returns:
          The number of lines before it that it stands for; None if it was only counted.
        """
        refilled = self._left + (now - self._now) / self._period
        self._left, self._now = min(self._burst, refilled), now
        if self._left < 1:
            self._others += 1
            return None
        self._left -= 1
        others, self._others = self._others, 0
        self._log(f"{line} (and {others} others before it)" if others else line)
        return others

    def flush(self) -> None:
        """Logs the count of what was not logged."""
        if self._others:
            self._log(f"and {self._others} more connections like these")
        self._others = 0
