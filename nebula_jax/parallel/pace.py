"""Pace of several clusters (section 3.3): which step comes next, and where a run ends.

Steps count from 1. After step t the leading cluster (the listener) sends a step token,
the paper's "small tensor". A follower may begin step t once the token of step t - 1 -
window has arrived: with window 0 the clusters take turns, with more they overlap.
"""

from collections.abc import Callable, Iterator, Sequence

from nebula_jax.communication.worker_link import AnyLink


def token_needed(step: int, window: int) -> int:
    """Returns the latest step whose token `step` waits for; none if it is below 1."""
    return step - 1 - window


def last_step_after_stop(done: int, window: int, total: int) -> int:
    """Returns where a run ends that is to stop while `done` steps have their token.

    A follower can have begun step done + window + 1, and nothing later: every cluster
    can still end exactly there, and save the same step.
    """
    return min(done + window + 1, total)


def alone(start: int, last: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
    """Yields the steps after `start` of a process alone, until `last` or a stop."""
    step = start
    while step < last and not stop_requested():
        step += 1
        yield step


def follow(
    link: AnyLink,
    start: int,
    last: int,
    window: int,
    stop_requested: Callable[[], bool],
    followers: Sequence[AnyLink] = (),
) -> Iterator[int]:
    """Yields a follower's steps, each as soon as the leader is near enough.

    `link` is to the leader, or to the cluster before this one in a chain, where the
    window is 0: tokens and the last step go on to its own `followers`, who dialed it,
    as they come, and requests to stop go the other way. The run ends at `last`, or
    earlier: once `stop_requested` is True, the leader names a step that all clusters
    can reach.
    """
    step, is_told = start, False
    while step < last:
        if stop_requested() or any(each.stop_step is not None for each in followers):
            link.stop()
        link.wait_for_step(token_needed(step + 1, window))
        named = link.stop_step
        last = min(last, named or last)  # never beyond the run
        for each in followers:
            # Before the token: who has it may begin the step after.
            if named and not is_told:
                each.stop(last)
            each.step_done(step)
        is_told = bool(named)
        if step >= last:
            return
        step += 1
        yield step


class Lead:
    """The leader's steps; `done` sends each one's token."""

    def __init__(
        self,
        links: Sequence[AnyLink],
        start: int,
        last: int,
        window: int,
        stop_requested: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        """Begins after step `start`; for the arguments see `follow`."""
        self._links, self._window, self._log = links, window, log
        self._step, self._last = start, last
        self._stop_requested, self._is_stopping = stop_requested, False

    def __iter__(self) -> Iterator[int]:
        """Yields the steps."""
        while self._step < self._last:
            self._step += 1
            yield self._step

    def done(self, step: int) -> None:
        """Sends the token of `step`; before it the last step, if the run is to end."""
        asking = [
            each.peer.cluster for each in self._links if each.stop_step is not None
        ]
        if not self._is_stopping and (asking or self._stop_requested()):
            self._is_stopping = True
            self._last = last_step_after_stop(step - 1, self._window, self._last)
            self._log(
                f"stopping, all clusters save step {self._last}:"
                f" {' and '.join(asking) or 'this cluster'} asked to stop"
            )
            for link in self._links:
                link.stop(self._last)
        for link in self._links:
            link.step_done(step)
