"""Silence of a connection, and peers that live but get nothing done.

Time is an argument: seconds on any clock that only goes forward.
"""

from nebula_jax.communication.wire.activity import Activity, Report

PINGS_PER_TIMEOUT = 4  # so that one late Ping does not look like silence

# Activity of a peer -> how many times --stuck_timeout it may take without getting
# anything done. One that waits for a third cluster has a watch of its own on that one,
# which ends the wait and names whom to blame. There is no circle of them: a round is
# sent before it is waited for, and links close in one order.
PATIENCE = {
    Activity.COMPUTING: 1.0,
    Activity.STARTING: 10.0,
    Activity.SAVING: 10.0,
    Activity.EVALUATING: 10.0,
    Activity.WAITING: 1.0,
    Activity.WAITING_FOR_ANOTHER: float("inf"),
}


class Liveness:
    """The times at which something last crossed a connection."""

    def __init__(self, timeout: float) -> None:
        """Starts without a connection.

        Args:
          timeout: seconds of silence after which the peer counts as gone.
        """
        self._timeout = timeout
        self._ping_interval = timeout / PINGS_PER_TIMEOUT
        self._last_sent = self._last_received = 0.0

    def connected(self, now: float) -> None:
        """Starts anew: there is a new connection."""
        self._last_sent = self._last_received = now

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
        """Returns the seconds until `timed_out` may change.

        Args:
          now: seconds.
          pings: whether `needs_ping` counts as well.
        """
        when = self._last_received + self._timeout
        if pings:
            when = min(when, self._last_sent + self._ping_interval)
        return max(0.0, when - now)


class Watch:
    """The progress of a peer: whether it gets anything done.

    Progress is a message that comes, or a part of one; or a Ping by which the peer has
    received more, done more, or turned to something else. Only a Ping convicts, one
    that comes after the time is up and reports nothing new: it shows that the line
    works, and what its sender is doing now. Time counts from one Ping to the next: not
    while there is no connection, and not while this side itself stood still.
    """

    def __init__(self, timeout: float) -> None:
        """Starts without a connection.

        Args:
          timeout: seconds between bytes of the peer, at most: see `Liveness`.
        """
        self.activity = Activity.STARTING
        """The peer's, as its latest Ping reported it."""
        self.received = 0
        """Bytes of messages that came, those of Pings left out."""
        self.progressed = 0.0
        """The time of the latest progress."""
        self.reads_nothing = False
        """True if the peer's latest Ping on this connection shows that it reads nothing
        at present, and misses nothing: it may have no room. One that waits for this
        side has room, so that what does not reach it was lost on the line."""
        self._timeout = timeout
        self._latest = 0.0  # the time to which `_count` counts
        self._count = self._count_at_progress = 0.0
        self._done = self._peer_received = 0

    def count(self, now: float) -> float:
        """Returns the seconds that count so far, from any start."""
        return self._count + min(max(now - self._latest, 0.0), self._timeout)

    def connected(self, now: float) -> None:
        """Starts a new connection."""
        self._latest = now
        self.progressed = self.progressed or now
        self.reads_nothing = False

    def moved(self, received: int, now: float) -> None:
        """Records how many bytes have come, those of whole Pings left out."""
        # A part of a Ping counts until the rest has come.
        if received > self.received:
            self.received = received
            self._progress(now)

    def pinged(self, report: Report, received: int, now: float) -> None:
        """Records a Ping.

        Args:
          report: of the peer's process.
          received: bytes that the peer has received.
          now: seconds.
        """
        self._count, self._latest = self.count(now), now
        has_received = received > self._peer_received
        is_waiting = report.activity is Activity.WAITING
        self.reads_nothing = not has_received and not is_waiting
        has_moved = has_received or report.done > self._done
        if has_moved or report.activity is not self.activity:
            self._progress(now)
        self.activity = report.activity
        self._done = max(self._done, report.done)
        self._peer_received = max(self._peer_received, received)

    def _progress(self, now: float) -> None:
        self._count, self._latest = self.count(now), now
        self._count_at_progress, self.progressed = self._count, now

    def limit(self, timeout: float) -> float:
        """Returns the seconds that the peer is given for what it is doing.

        Args:
          timeout: --stuck_timeout, seconds.
        """
        return timeout * PATIENCE[self.activity]

    def is_stuck(self, begin: float, timeout: float) -> bool:
        """Returns True if the peer got nothing done for too long.

        Args:
          begin: `count` when this side began to wait for it.
          timeout: --stuck_timeout, seconds.
        """
        idle = self._count - max(begin, self._count_at_progress)
        return idle >= self.limit(timeout)
