"""The operating system and threads that production code gets in a simulation.

Each class here stands for a module of the standard library. Code that requests
something else of it gets an AttributeError, and nothing real by accident.
"""

import collections
import contextlib
import functools
import operator
import queue as real_queue
import resource as real_resource
import secrets as real_secrets
import select as real_select
import selectors as real_selectors
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation import network as network_lib
from tests.simulation import world as world_lib

POLL_SECONDS = 1e-6  # that a poll takes: time never stands still for who keeps at it
MOST_AT_ONCE = 2_000  # polls without a wait: somebody spins
FILES = 1024  # that a process may have

world: Any = None
network: Any = None
"""The `World` and `Network` of the present run: a module cannot be passed them."""


class Time:
    def monotonic(self) -> float:
        world.process()
        return world.now

    time = perf_counter = monotonic
    localtime, strftime = (
        staticmethod(real_time.gmtime),
        staticmethod(real_time.strftime),
    )

    def sleep(self, seconds: float) -> None:
        world.sleep((), seconds)


class Lock:
    def __init__(self) -> None:
        self._is_free = True
        self._waiting: network_lib.Place = collections.deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world.process()
        if self._is_free:
            self._is_free = False
            return True
        if not blocking or timeout == 0:
            return False
        return world.sleep((self._waiting,), None if timeout < 0 else timeout)

    def release(self) -> None:
        world.process()
        while self._waiting:
            if world.wake(self._waiting.popleft()):
                return  # it is theirs now
        self._is_free = True

    def __enter__(self) -> bool:
        world.give_way()
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
        world.give_way()


class Thread:
    def __init__(
        self,
        *,
        target: Callable[..., Any],
        args: tuple = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._target, self._args = target, args
        self.name, self.daemon = name, daemon
        self._task: world_lib.Task | None = None

    def start(self) -> None:
        self._task = world.process().start(lambda: self._target(*self._args))

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        if not self._task.dead:
            world.sleep((self._task.ended,), timeout)


class Queue:
    def __init__(self, maxsize: int = 0) -> None:
        self._most = maxsize
        self._items: collections.deque[Any] = collections.deque()
        self._waiting: network_lib.Place = collections.deque()

    def put_nowait(self, item: Any) -> None:
        if 0 < self._most <= len(self._items):
            raise real_queue.Full
        self._items.append(item)
        world.wake_all(self._waiting)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = None if timeout is None else world.now + timeout
        while not self._items:
            left = None if until is None else until - world.now
            if not block or (left is not None and left <= 0):
                raise real_queue.Empty
            world.sleep((self._waiting,), left)
        return self._items.popleft()

    def full(self) -> bool:
        return 0 < self._most <= len(self._items)

    def empty(self) -> bool:
        return not self._items


class Poll:
    def __init__(self) -> None:
        self._process = world.process()
        self._events: dict[int, int] = {}
        self._at_once = 0  # times that there was no need to wait

    def register(self, what: Any, events: int = 7) -> None:
        self._events[what if isinstance(what, int) else what.fileno()] = events

    modify = register

    def unregister(self, what: Any) -> None:
        del self._events[what if isinstance(what, int) else what.fileno()]

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        unlimited = milliseconds is None or milliseconds < 0
        until = None if unlimited else world.now + milliseconds / 1000
        while True:
            world.process()
            ready = list(self._ready())
            left = None if until is None else until - world.now
            if ready or (left is not None and left <= 0):
                self._at_once += 1
                if self._at_once > MOST_AT_ONCE:
                    raise world_lib.Violation("a poll returns at once, for ever")
                world.spend(POLL_SECONDS)
                return ready
            self._at_once = 0
            descriptors = self._process.descriptors
            places = [descriptors[fd].changed for fd in self._events]
            world.sleep(places, left)

    def _ready(self) -> Iterator[tuple[int, int]]:
        for fd, events in self._events.items():
            thing = self._process.descriptors.get(fd)
            if thing is None:
                yield fd, real_select.POLLNVAL
                continue
            reads, writes = thing.readiness()
            found = real_select.POLLIN * reads | real_select.POLLOUT * writes
            if found & events:
                yield fd, found & events


class Selector(real_selectors._PollLikeSelector):
    _selector_cls = Poll
    _EVENT_READ, _EVENT_WRITE = real_select.POLLIN, real_select.POLLOUT


def _getaddrinfo(host: str, port: int, **_: Any) -> list[tuple]:
    kinds = real_socket.AF_INET, real_socket.SOCK_STREAM, 0, ""
    return [(*kinds, (host, port))]


def _socket(*_: Any) -> network_lib.Listening:
    return network_lib.Listening(network, world.process())


def _create_connection(address: tuple[str, int], timeout: float) -> network_lib.Socket:
    return network.connect(address[0], timeout)


def _socketpair() -> tuple[network_lib.Socket, network_lib.Socket]:
    process = world.process()
    one = network_lib.Socket(network, process, None, process.host)
    other = network_lib.Socket(network, process, None, process.host)
    one.peer, other.peer = other, one
    return one, other


def missing(where: str, name: str) -> AttributeError:
    """Ends the run, whoever catches the error: the simulation lacks something."""
    error = AttributeError(f"the simulated {where} has no {name!r}")
    if world is not None:
        world.fail(str(error), error)
    return error


class Module:
    """A module of which only some names are there."""

    def __init__(self, name: str, **names: Any) -> None:
        self._name = name
        self.__dict__ |= names

    def __getattr__(self, name: str) -> Any:
        raise missing(self._name, name)


def _constants(module: Any, *prefixes: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and name.startswith(prefixes)
    }


MODULES = {
    real_time: Time(),
    real_threading: Module("threading", Lock=Lock, Thread=Thread),
    real_queue: Module(
        "queue", Queue=Queue, Full=real_queue.Full, Empty=real_queue.Empty
    ),
    real_secrets: Module(
        "secrets", token_bytes=lambda size: world.random.randbytes(size)
    ),
    real_resource: Module(
        "resource",
        getrlimit=lambda _: (FILES, FILES),
        **_constants(real_resource, "RLIM"),
    ),
    real_select: Module("select", poll=Poll, **_constants(real_select, "POLL")),
    real_selectors: Module(
        "selectors",
        DefaultSelector=Selector,
        PollSelector=Selector,
        **_constants(real_selectors, "EVENT_"),
    ),
    real_socket: Module(
        "socket",
        socket=_socket,
        getaddrinfo=_getaddrinfo,
        has_dualstack_ipv6=lambda: True,
        create_connection=_create_connection,
        socketpair=_socketpair,
        **_constants(real_socket, "AF_", "IP", "SHUT_", "SO", "TCP_"),
    ),
}
PACKAGES = ("nebula_jax.communication", "nebula_jax.parallel", "nebula_jax.runtime")


@functools.cache
def _replaced() -> list[tuple[Any, str, Any, Any]]:
    """Returns (where, name, real, simulated) of what production code gets."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(PACKAGES):
            for name, value in vars(module).items():
                if isinstance(value, type(sys)) and value in MODULES:
                    found.append((module, name, value, MODULES[value]))
                elif getattr(value, "__module__", None) == module_name:
                    found += _defaults(value)
    return found


def _clock(value: Any) -> Any:
    return MODULES[real_time].monotonic if value is real_time.monotonic else value


def _defaults(thing: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yields the clocks that a function, or a class's, has as defaults."""
    inside = vars(thing).values() if isinstance(thing, type) else ()
    for function in (thing, *inside):
        before = getattr(function, "__defaults__", None) or ()
        after = tuple(_clock(each) for each in before)
        if any(map(operator.is_not, after, before)):
            yield function, "__defaults__", before, after


@contextlib.contextmanager
def installed(*more: tuple[Any, str, Any]) -> Iterator[None]:
    """Gives production modules the simulated ones; also patches `more`."""
    before = []
    try:
        for where, name, real, simulated in _replaced():
            before.append((where, name, real))
            setattr(where, name, simulated)
        for module, key, value in more:
            before.append((module, key, getattr(module, key)))
            setattr(module, key, value)
        yield
    finally:
        for module, key, value in reversed(before):
            setattr(module, key, value)
