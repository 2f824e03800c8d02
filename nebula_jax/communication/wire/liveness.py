"""Silence of a connection: when a Ping is due, and when the peer counts as gone.

Peers that send Pings and get nothing done are the matter of `stuck_peers`.

Time is an argument: seconds on any clock that only goes forward.
"""

from nebula_jax import errors

PINGS_PER_TIMEOUT = 4  # so that one late Ping does not look like silence


class PeerGone(errors.NebulaError):
    """A connection that ended, or fell silent, without an End."""


class Liveness:
    """The times at which something last crossed a connection."""

    def __init__(self, timeout: float) -> None:
        """Starts without a connection; a peer is gone after `timeout` of silence."""
        self._timeout = timeout
        self._ping_interval = timeout / PINGS_PER_TIMEOUT
        self._last_sent = self._last_received = 0.0

    def connected(self, now: float) -> None:
        """Starts anew: there is a new connection."""
        self.received(now)
        self._last_sent = now

    def sent(self, now: float) -> None:
        """Records that a frame leaves."""
        self._last_sent = now

    def received(self, now: float) -> None:
        """Records that bytes came, or that this side leaves them unread."""
        self._last_received = now

    def silence(self, now: float) -> float:
        """Returns the seconds since the last bytes of the peer."""
        return now - self._last_received

    def timed_out(self, now: float) -> bool:
        """Returns True if the peer has been silent for too long."""
        return self.silence(now) >= self._timeout

    def needs_ping(self, now: float) -> bool:
        """Returns True if this side has been silent for long enough."""
        return now >= self._last_sent + self._ping_interval

    def next_check(self, now: float, pings: bool) -> float:
        """Returns the seconds until any of these may change, or `needs_ping` too."""
        when = self._last_received + self._timeout
        if pings:
            when = min(when, self._last_sent + self._ping_interval)
        return max(0.0, when - now)
