"""Stuck peers: they live and get nothing done, and a caller gives them up for it.

A Ping shows that a peer's process lives, not that it gets on. So every Ping has what
its sender is doing and has done (`activity`). Time is an argument: seconds on any clock
that only goes forward.
"""

import time
from collections.abc import Callable

from nebula_jax.communication.wire import liveness
from nebula_jax.communication.wire.activity import Activity, Report, Work

CHECKS_PER_TIMEOUT = 8  # an error comes so much later than it could, at most

# Activity of a peer -> how many stuck-peer timeouts it may take without progress. One
# that waits for a third cluster has a watch of its own on that one,
# which ends the wait and names whom to blame. There is no circle of them: a round is
# sent before it is waited for, and links close in one order.
TIMES_ALLOWED = {
    Activity.COMPUTING: 1.0,
    Activity.STARTING: 10.0,
    Activity.SAVING: 10.0,
    Activity.EVALUATING: 10.0,
    Activity.WAITING: 1.0,
    Activity.WAITING_FOR_ANOTHER: float("inf"),
}

DOING = {
    Activity.COMPUTING: "is computing",
    Activity.STARTING: "is starting",
    Activity.SAVING: "is saving",
    Activity.EVALUATING: "is evaluating",
    Activity.WAITING: "is waiting for {}",
    Activity.WAITING_FOR_ANOTHER: "is waiting for another cluster",
}


class PeerStuck(liveness.PeerGone):
    """A peer that lives and gets nothing done."""


class Watch:
    """The progress of a peer: whether it gets anything done.

    Progress is a message that comes, or a part of one; or a Ping by which the peer has
    received more, done more, or turned to something else. Only a Ping convicts, one
    that comes after the time is up and reports nothing new: it shows that the line
    works, and what its sender is doing now. Time counts from one Ping to the next: not
    while there is no connection, and not while this side itself stood still.
    """

    def __init__(self, timeout: float) -> None:
        """Starts without a connection; `timeout` is that of `Liveness`."""
        self.activity = Activity.STARTING  # the peer's, as its latest Ping reported it
        self.received = 0  # bytes of messages that came, those of Pings left out
        self.progressed = 0.0  # the time of the latest progress
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
        """Records a Ping, by which the peer has received so many bytes."""
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
        """Returns the seconds that the peer is given for what it is doing."""
        return timeout * TIMES_ALLOWED[self.activity]

    def is_stuck(self, begin: float, timeout: float) -> bool:
        """Returns True if nothing got done for too long since `count` was `begin`."""
        idle = self._count - max(begin, self._count_at_progress)
        return idle >= self.limit(timeout)


class Wait:
    """A caller's wait for something that only the peer can bring about."""

    def __init__(
        self,
        cluster: str,
        what: str,
        peer: str,
        watch: Watch,
        work: Work,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to wait; `work`, of this process, has the stuck-peer timeout."""
        self._cluster, self._what, self._peer = cluster, what, peer
        self._watch, self._work, self._clock = watch, work, clock
        self._start = clock()
        self._begin = watch.count(self._start)

    @property
    def seconds(self) -> float:
        """The seconds since the wait began."""
        return self._clock() - self._start

    def pause(self, timeout: float | None = None) -> float:
        """Returns the seconds to sleep before the next look, in a wait of `timeout`."""
        if timeout is not None:
            return max(0.0, timeout - self.seconds)
        return self._work.stuck_timeout / CHECKS_PER_TIMEOUT

    def check(self) -> None:
        """Raises PeerStuck if the peer got nothing done for too long."""
        watch, timeout = self._watch, self._work.stuck_timeout
        if not watch.is_stuck(self._begin, timeout):
            return
        doing = DOING[watch.activity].format(self._cluster)
        silent = self._clock() - watch.progressed
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        times = TIMES_ALLOWED[watch.activity]
        many = "" if times == 1 else f", {times:g} times that for one that {doing}"
        raise PeerStuck(
            f"{self._cluster} has waited {self.seconds:.0f} s for {self._what} from"
            f" {self._peer}, which reports that it {doing}; nothing but signs"
            f" of life came since {since} (stuck_timeout: {timeout:g} s{many})"
        )
