"""Wake-ups: of the one thread that polls, and of the callers that wait for news."""

import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable


class Waker:
    """A socket to itself: a poll of it and others ends at `wake`."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._ours, select.POLLIN)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable."""
        return self._ours.fileno()

    def wake(self) -> None:
        """Wakes the thread, now or when it next goes to sleep."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._theirs.send(b"\0")

    def clear(self) -> None:
        """Forgets all wake-ups so far."""
        with contextlib.suppress(OSError):  # nothing is left
            while self._ours.recv(4096):
                pass

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, or until `wake`."""
        if self._poller.poll(1000 * seconds):
            self.clear()

    def close(self) -> None:
        """Frees the sockets."""
        self._ours.close()
        self._theirs.close()


class Waiters:
    """The callers that wait: each sleeps on a lock of its own, which costs little."""

    def __init__(self) -> None:
        self._sleeping: collections.deque[threading.Lock] = collections.deque()

    def wait(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Sleeps until `is_done` holds: it is called at first and at each `notify`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_done():
            lock = threading.Lock()
            lock.acquire()
            self._sleeping.append(lock)
            left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
            # Again, since something may have changed before the lock was there.
            if is_done() or not lock.acquire(timeout=left):
                with contextlib.suppress(ValueError):  # notified at the same time
                    self._sleeping.remove(lock)
                return

    def notify(self) -> None:
        """Wakes all, after something changed that one of them may wait for."""
        for _ in range(len(self._sleeping)):
            with contextlib.suppress(IndexError):  # one has gone meanwhile
                self._sleeping.popleft().release()
