"""Callers that sleep until there is news for them."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable


class Waiters:
    """The callers who wait: each sleeps on a lock of its own, which costs little."""

    def __init__(self) -> None:
        self._sleeping: collections.deque[threading.Lock] = collections.deque()

    def wait(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Sleeps until `is_done` holds.

        Args:
          is_done: evaluated at first, and after each `notify`.
          timeout: seconds; None for no limit.
        """
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
