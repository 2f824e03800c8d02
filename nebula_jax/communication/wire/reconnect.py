"""The policy for connections that break: when to dial again, and when to give up.

A connection that opens is not enough: if the line damages whatever follows, or breaks
again at once, the time without one adds up, and pauses grow, until a message has
crossed. Time is an argument: seconds on any clock that only goes forward.
"""

import random

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts. A line that is back is found within 5 s: an attempt that
nobody answers knocks for the last time 2 s before it ends (`bridge.SILENT_SECONDS`,
and TCP's pauses of 1 s, 2 s)."""
LASTING_SECONDS = 30.0
"""A connection that lasts so long is a good one, unless something waited so long on it
that the peer would have read."""


class Reconnect:
    """The state of a session that may have lost its connection."""

    def __init__(self, timeout: float, seed: bytes) -> None:
        """Starts connected; `timeout` is in seconds, `seed` of the pauses' jitter."""
        self.timeout = timeout
        self._jitter = random.Random(seed)
        self.is_lost = False  # True if it broke, and no other one has opened since
        self.outages, self.seconds = 0, 0.0  # reconnections, and seconds without one
        self._lost_at = self._recovered_at = 0.0
        self._away = 0.0  # seconds, before the present loss
        self._crossed = -1
        self._loss = self._failure = ""
        self._pause = 0.0

    def lost(self, now: float, reason: str, crossed: int, idle_at: float) -> bool:
        """Records that the connection broke; returns True if there was one.

        An attempt that breaks half-way changes nothing. `crossed` messages, of the
        whole session, had crossed by then; until `idle_at` nothing was in flight that
        the peer would have read.
        """
        if self.is_lost:
            return False
        has_lasted = now - self._recovered_at >= LASTING_SECONDS
        has_waited = now - max(idle_at, self._recovered_at) >= LASTING_SECONDS
        if crossed > self._crossed or (has_lasted and not has_waited):
            self._away = self._pause = 0.0
        self.is_lost, self._lost_at, self._loss = True, now, reason
        self._crossed = crossed
        return True

    def failed(self, reason: str) -> None:
        """Records why the latest attempt failed."""
        self._failure = f": {reason}"

    def next_pause(self) -> float:
        """Returns the seconds before the next attempt; the first one is at once."""
        pause = self._pause * self._jitter.uniform(0.5, 1.0)
        self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        return pause

    def deadline(self, limit: float = float("inf")) -> float:
        """Returns when to give up, at most `limit` seconds after a loss."""
        if not self.is_lost:
            return float("inf")
        return self._lost_at + min(self.timeout, limit) - self._away

    def recovered(self, now: float) -> float:
        """Records a new connection; returns the seconds without one."""
        away = now - self._lost_at
        self.outages, self.seconds = self.outages + 1, self.seconds + away
        self.is_lost, self._failure = False, ""
        self._away, self._recovered_at = self._away + away, now
        return away

    @property
    def explanation(self) -> str:
        """The reason for giving up."""
        if not self.timeout:
            return self._loss
        came = "no new connection came about"
        if self._away:
            came = "no message crossed on any new connection"
        return (
            f"{self._loss}, and {came} within {self.timeout:g} s"
            f" (reconnect_timeout){self._failure}"
        )
