"""Patience with a peer that lives: how long a caller waits for it, and then why not."""

import time
from collections.abc import Callable

from nebula_jax.communication.wire import liveness, session
from nebula_jax.communication.wire.activity import Activity, Work

CHECKS_PER_TIMEOUT = 8  # an error comes so much later than it could, at most

DOING = {
    Activity.COMPUTING: "is computing",
    Activity.STARTING: "is starting",
    Activity.SAVING: "is saving",
    Activity.EVALUATING: "is evaluating",
    Activity.WAITING: "is waiting for {}",
    Activity.WAITING_FOR_ANOTHER: "is waiting for another cluster",
}


class Patience:
    """A caller's wait for something that only the peer can bring about."""

    def __init__(
        self,
        cluster: str,
        what: str,
        peer: session.Session,
        work: Work,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to wait.

        Args:
          cluster: that waits.
          what: a name for what it waits for.
          peer: the session with the peer.
          work: of this process; it has --stuck_timeout.
          clock: that the session's times are of.
        """
        self._cluster, self._what, self._session = cluster, what, peer
        self._work, self._clock = work, clock
        self._start = clock()
        self._begin = peer.watch.count(self._start)

    @property
    def seconds(self) -> float:
        """The seconds since the wait began."""
        return self._clock() - self._start

    def pause(self, timeout: float | None = None) -> float:
        """Returns the seconds to sleep before the next look.

        Args:
          timeout: seconds that the wait may take; None to leave it to `check`.
        """
        if timeout is not None:
            return max(0.0, timeout - self.seconds)
        return self._work.stuck_timeout / CHECKS_PER_TIMEOUT

    def check(self) -> None:
        """Raises session.PeerStuck if the peer got nothing done for too long."""
        watch, timeout = self._session.watch, self._work.stuck_timeout
        if not watch.is_stuck(self._begin, timeout):
            return
        doing = DOING[watch.activity].format(self._cluster)
        silent = self._clock() - watch.progressed
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        times = liveness.PATIENCE[watch.activity]
        many = "" if times == 1 else f", {times:g} times that for one that {doing}"
        raise session.PeerStuck(
            f"{self._cluster} has waited {self.seconds:.0f} s for {self._what} from"
            f" {self._session.peer}, which reports that it {doing}; nothing but signs"
            f" of life came since {since} (--stuck_timeout: {timeout:g} s{many})"
        )
