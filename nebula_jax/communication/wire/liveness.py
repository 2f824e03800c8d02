"""Silence of a connection: when a Ping is due, and when the peer counts as gone.

Peers that send Pings and get nothing done are the matter of `stuck_peers`. Time is an
argument: seconds on any clock that only goes forward.
"""

from nebula_jax import errors

PINGS_PER_TIMEOUT = 4  # so that one late Ping does not look like silence
NOTED_SECONDS = 10.0  # of silence that is noted, or longer if Pings are rarer:
NOTED_SHARE = 1 / 3  # of the timeout, in which a Ping has to come


class PeerGone(errors.NebulaError):
    """A connection that ended, or fell silent, without an End."""


class Liveness:
    """The times at which something last crossed a connection."""

    def __init__(self, timeout: float) -> None:
        """Starts without a connection; a peer is gone after `timeout` of silence."""
        self._timeout = timeout
        self._ping_interval = timeout / PINGS_PER_TIMEOUT
        self._noted_after = min(timeout, max(NOTED_SECONDS, NOTED_SHARE * timeout))
        self._last_sent = self._last_received = 0.0
        self.is_noted = False  # True if the present silence was noted
        self._ended = 0.0  # seconds of a noted silence that is over

    def connected(self, now: float) -> None:
        """Starts anew: there is a new connection."""
        self.received(now)
        self._last_sent = now

    def lost(self) -> None:
        """Ends the connection, and with it a silence that was noted."""
        self.is_noted, self._ended = False, 0.0

    def sent(self, now: float) -> None:
        """Records that a frame leaves."""
        self._last_sent = now

    def received(self, now: float) -> None:
        """Records that bytes came, or that this side leaves them unread."""
        if self.is_noted:
            self.is_noted, self._ended = False, self.silence(now)
        self._last_received = now

    def silence(self, now: float) -> float:
        """Returns the seconds since the last bytes of the peer."""
        return now - self._last_received

    def timed_out(self, now: float) -> bool:
        """Returns True if the peer has been silent for too long."""
        return self.silence(now) >= self._timeout

    def is_late(self, now: float) -> bool:
        """Returns True if something should have come, and that is not noted yet."""
        return not self.is_noted and self.silence(now) >= self._noted_after

    def ended(self) -> float:
        """Returns the seconds of a noted silence that has ended since; 0 if none."""
        seconds, self._ended = self._ended, 0.0
        return seconds

    def needs_ping(self, now: float) -> bool:
        """Returns True if this side has been silent for long enough."""
        return now >= self._last_sent + self._ping_interval

    def next_check(self, now: float, pings: bool) -> float:
        """Returns the seconds until any of these may change, or `needs_ping` too."""
        silence = self._timeout if self.is_noted else self._noted_after
        when = self._last_received + silence
        if pings:
            when = min(when, self._last_sent + self._ping_interval)
        return max(0.0, when - now)
