"""The log of connections that came to nothing: a line for each, or one for very many.

Time is an argument: seconds on any clock that only goes forward.
"""

from collections.abc import Callable

PERIOD_SECONDS = 60.0
MAX_LINES = 20  # a period: what anybody can cause shall not fill the disk


class Drops:
    """A log that counts what it leaves out, and logs the count."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Starts with nothing counted; `log` is called with a line."""
        self._log = log
        self._lines = self._unlogged = 0
        self.deadline = float("inf")
        """The time at which `tick` has something to do."""

    def add(self, line: str, now: float) -> None:
        """Logs a line, or counts it."""
        self.tick(now)
        if not self._lines:
            self.deadline = now + PERIOD_SECONDS
        if self._lines == MAX_LINES:
            self._unlogged += 1
            return
        self._lines += 1
        self._log(line)

    def tick(self, now: float) -> None:
        """Ends the period if it is over."""
        if now >= self.deadline:
            self.flush()

    def flush(self) -> None:
        """Logs the count of what was not logged, and begins a new period."""
        if self._unlogged:
            self._log(f"and {self._unlogged} more connections like these")
        self._lines = self._unlogged = 0
        self.deadline = float("inf")
