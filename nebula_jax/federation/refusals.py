"""Refusals of connections from outside: each an entry, or one for very many.

Anybody can connect, and a log that anybody can fill is soon no log. So after the first
few there is an entry a second at most, with how many it stands for.
"""

from collections.abc import Callable

from nebula_jax.security.tls import peer_tls

BURST = 20  # entries that need not wait
PER_SECOND = 1.0


class Refusals:
    """The refusals of one switch."""

    def __init__(self, record: Callable[[str, str, int, str], None]) -> None:
        """Starts without any.

        Args:
          record: called with host, reason, how many others came since the last entry,
            and the error in words.
        """
        self._record = record
        self._left, self._now, self._others = float(BURST), 0.0, 0

    def add_error(self, host: str, error: BaseException, now: float) -> None:
        """Takes the refusal that an error is.

        Args:
          host: that connected, or its lab.
          error: why.
          now: as for `add`.
        """
        self.add(host, peer_tls.reason_of(error), str(error), now)

    def add(self, host: str, reason: str, text: str, now: float) -> None:
        """Takes a refusal.

        Args:
          host: that connected.
          reason: one word.
          text: the error.
          now: seconds on any clock that only goes forward.
        """
        self._left = min(BURST, self._left + (now - self._now) * PER_SECOND)
        self._now = now
        if self._left < 1:
            self._others += 1
            return
        self._left -= 1
        others, self._others = self._others, 0
        self._record(host, reason, others, text)
