"""A way to wake a thread that sleeps in a poll."""

import contextlib
import select
import socket


class Waker:
    """A socket to itself: what is polled beside it ends when somebody wakes."""

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
        """Forgets that somebody woke."""
        with contextlib.suppress(OSError):  # nothing is left
            while self._ours.recv(4096):
                pass

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, or until somebody wakes."""
        if self._poller.poll(1000 * seconds):
            self.clear()

    def close(self) -> None:
        """Frees the sockets."""
        self._ours.close()
        self._theirs.close()
