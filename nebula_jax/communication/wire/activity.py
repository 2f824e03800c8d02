"""The activities of a process, as Pings report them; `stuck_peers` waits by them."""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nebula_jax import trace as trace_lib

LEAST_SECONDS = 60.0  # a busy machine may hold up a short step for so long
STEPS = 20  # of the longest so far: none of this run took nearly as long
UNMEASURED_SECONDS = 600.0  # before a step is measured


class Activity(enum.IntEnum):
    """An activity, by its number in a Ping."""

    COMPUTING = 0
    STARTING = 1  # until its first step is done: it reads files and compiles
    SAVING = 2
    EVALUATING = 3
    WAITING = 4  # for the one who gets the Ping
    WAITING_FOR_ANOTHER = 5


class Report(NamedTuple):
    """A process's report of itself."""

    activity: Activity = Activity.COMPUTING
    done: int = 0  # a number that grows with what it gets done: its steps


class Work:
    """The work of this process, given to each of its links."""

    def __init__(
        self,
        stuck_timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        trace: trace_lib.Trace = trace_lib.OFF,
    ) -> None:
        """Starts as STARTING; a timeout of 0 seconds is derived from the steps."""
        self.trace = trace  # the spans of this process; an activity is one
        self.waiting: list[str] = []  # what for, of each caller who waits for a peer
        self.on_lost: Callable[[str], None] = lambda peer: None
        """Called, again and again, by who waits for a peer that is lost, with its name;
        raises an error to end the wait."""
        self._given, self._clock = stuck_timeout, clock
        self._activity, self._done = Activity.STARTING, 0
        self._last: float | None = None
        self._longest = 0.0

    @contextlib.contextmanager
    def busy(self, activity: Activity) -> Iterator[None]:
        """Reports an activity meanwhile."""
        before, self._activity = self._activity, activity
        try:
            with self.trace.span(activity.name.lower()):
                yield
        finally:
            self._activity = before

    def begin(self) -> None:
        """Records that the first step begins."""
        self._last = self._clock()

    def step_done(self) -> None:
        """Records that a step is done, and that the next one begins."""
        now, before = self._clock(), self._last
        if before is not None:
            self._longest = max(self._longest, now - before)
        self._last = now
        self._done += 1
        if self._activity is Activity.STARTING:
            self._activity = Activity.COMPUTING

    @property
    def stuck_timeout(self) -> float:
        """The seconds after which a peer that gets nothing done counts as stuck.

        Unless given: STEPS times the longest step so far, with all that it waited for.
        """
        if self._given:
            return self._given
        if not self._longest:
            return UNMEASURED_SECONDS
        return max(LEAST_SECONDS, STEPS * self._longest)

    def report(self, is_waited_for: bool) -> Report:
        """Returns the report for a peer; `is_waited_for`: for which this one waits."""
        activity = self._activity
        if self.waiting:
            activity = Activity.WAITING_FOR_ANOTHER
        if is_waited_for:
            activity = Activity.WAITING
        return Report(activity, self._done)
