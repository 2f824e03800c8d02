"""Connections whose session is not known yet: how many there may be, and who is first.

Anybody can connect, and stay silent. So there is a bound on all newcomers together, and
who comes when it is reached drives out the oldest one of the address that has the most:
a flood drives out itself. Time and sockets are the caller's.
"""

import dataclasses
import ipaddress
import resource
import socket
from collections.abc import Collection, Iterator

from nebula_jax.communication.wire import greeting

MOST = 1024  # at a time; fewer where a process may not have so many files
KEPT = 8  # places of each known peer's address that no other address takes
SUBNET_BITS = 64  # of an IPv6 address: the rest is the owner's to choose


@dataclasses.dataclass(eq=False)
class Newcomer:
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


class Newcomers:
    """The newcomers of a listener, from the oldest on."""

    def __init__(self, most: int) -> None:
        """Starts without any.

        Args:
          most: at a time.
        """
        self._most = most
        self._groups: dict[str, dict[Newcomer, None]] = {}  # sets that keep their order
        self._all: dict[Newcomer, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, newcomer: object) -> bool:
        return newcomer in self._all

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(list(self._all))

    @property
    def oldest(self) -> Newcomer | None:
        """The one that has been here for longest."""
        return next(iter(self._all), None)

    @property
    def is_full(self) -> bool:
        """True if one has to go before another one comes."""
        return len(self._all) >= self._most

    def add(self, newcomer: Newcomer) -> None:
        """Adds the newest one."""
        self._count += 1
        self._all[newcomer] = self._count
        self._groups.setdefault(newcomer.group, {})[newcomer] = None

    def remove(self, newcomer: Newcomer) -> None:
        """Removes one."""
        del self._all[newcomer]
        members = self._groups[newcomer.group]
        del members[newcomer]
        if not members:
            del self._groups[newcomer.group]

    def to_go(self, known: Collection[str]) -> Newcomer | None:
        """Returns the one to close so that another one can come, if there is any.

        Args:
          known: groups of the peers of sessions.
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
        self, ready: Collection[Newcomer], known: Collection[str]
    ) -> list[Newcomer]:
        """Returns those that can go on in the order in which they should.

        First who is expected; then who has not begun, which is cheap, and may show that
        it is expected; then known peers' addresses, then the address that has the
        fewest; of one address, the newest: in a flood the oldest ones are those whose
        peers have given up, or never meant to go on.

        Args:
          ready: some of them.
          known: groups of the peers of sessions.
        """

        def rank(newcomer: Newcomer) -> tuple[bool, bool, bool, int, int]:
            return (
                not newcomer.is_expected,
                newcomer.has_begun,
                newcomer.group not in known,
                len(self._groups[newcomer.group]),
                -self._all[newcomer],
            )

        return sorted(ready, key=rank)


def most() -> int:
    """Returns how many newcomers there may be: half of a process's files at most."""
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
