"""The time of a run: its progress, its end, and requests to stop.

A schedule by time (--total_time) needs every step's progress before the step, and the
same in all clusters, whose clocks differ. So with each round they agree on how long the
run has lasted (the largest of their times); between two rounds progress is a straight
line through the steps. A process that resumes from a checkpoint counts on from the time
there.

    24hBERT (Izsak et al. 2021) has such a schedule, for one machine.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from nebula_jax.communication import ranks
from nebula_jax.parallel.local_steps import messages

EVERY = 10
"""Steps between two looks at the clock, in a run of one cluster."""
MOST_STEPS = 2**31 - 1  # optimizers count in int32
RESERVE = 0.03
"""Share of the time that is left for the last evaluation and the last checkpoint."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """The time of a run as its clusters last agreed on it; frozen, as it is saved."""

    total_ms: int
    """Milliseconds that training may take."""
    agreed_ms: int = 0
    """Milliseconds that it had lasted when they last agreed."""
    agreed_step: int = 0
    """The step after which that was measured."""
    per_step_ms: float = 0.0
    """Milliseconds of a step, in the time before; 0 while not known."""
    before_ms: int = 0
    """Milliseconds that it had lasted when they agreed before that."""
    before_step: int = 0
    """The step after which that was measured."""

    def progress(self, step: int) -> float:
        """Returns the share of the run that is over before a step; at most 1."""
        steps = max(0, step - 1 - self.agreed_step)
        return min(1.0, (self.agreed_ms + steps * self.per_step_ms) / self.total_ms)

    def is_over(self, step: int) -> bool:
        """Returns True if no step comes after `step`."""
        return self.progress(step + 1) >= 1.0

    def agreed(self, step: int, milliseconds: Sequence[int]) -> "Clock":
        """Returns the clock after the clusters have exchanged their times of a step."""
        now, steps = max(milliseconds), step - self.agreed_step
        if not steps:
            return dataclasses.replace(self, agreed_ms=now)
        return Clock(
            self.total_ms,
            agreed_ms=now,
            agreed_step=step,
            per_step_ms=max(0.0, (now - self.agreed_ms) / steps),
            before_ms=self.agreed_ms,
            before_step=self.agreed_step,
        )

    @property
    def latest(self) -> list[tuple[int, int]]:
        """The last two agreements, step and milliseconds; fewer if there were fewer.

        A clock that has agreed on these alone is equal to this one.
        """
        both = (self.before_step, self.before_ms), (self.agreed_step, self.agreed_ms)
        return [each for each in both if each[0]]


class Timer:
    """The time of one cluster's run, and what all have agreed on."""

    def __init__(self, seconds: float | None, steps: int = 0) -> None:
        """Begins now.

        Args:
          seconds: that the run may take; None if its steps count.
          steps: of the run, unless it ends by time.
        """
        self._began, self._before = time.monotonic(), 0
        self._clock: Clock | None = None
        if seconds is not None:
            self._clock = Clock(max(1, round(1000 * seconds * (1 - RESERVE))))
        self._is_stopping = False
        self.shown = steps if self._clock is None else 0
        """The steps of the run for its progress lines; 0 if not known."""
        self.most = steps if self._clock is None else MOST_STEPS
        """A step after which there is none."""

    @property
    def position(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        clock = dataclasses.asdict(self._clock) if self._clock else None
        return {"milliseconds": self._milliseconds(), "clock": clock}

    def resume(self, position: dict[str, Any] | None) -> None:
        """Resumes from a checkpoint; None to begin."""
        if position is None:
            return
        self._before = position["milliseconds"]
        if self._clock is not None:
            self._clock = Clock(**position["clock"])

    def _milliseconds(self) -> int:
        return self._before + round(1000 * (time.monotonic() - self._began))

    def now(self, is_requested: bool) -> tuple[int, bool]:
        """Returns the milliseconds of the run, and if its end is requested.

        Both are the root's, in all processes of the cluster. Without a time there are 0
        milliseconds: a run by steps may last longer than a message can have.
        """
        own = 0 if self._clock is None else self._milliseconds()
        values = ranks.exchange([own, int(is_requested)])[ranks.ROOT]
        return int(values[0]), bool(values[1])

    def alone(self, step: int, is_requested: bool) -> list[messages.Head]:
        """Returns what a run of one cluster agrees on with itself, now and then."""
        if ranks.count() > 1 and step % EVERY:
            return []
        milliseconds, is_stopping = self.now(is_requested)
        return [messages.Head(step, 0, 0, 0, milliseconds, int(is_stopping))]

    def agree(self, heads: Sequence[messages.Head]) -> None:
        """Takes the times and requests that the clusters have sent, round by round."""
        self._is_stopping |= any(head.is_stopping for head in heads)
        if self._clock is None:
            return
        for step, group in itertools.groupby(heads, lambda head: head.step):
            times = [head.milliseconds for head in group]
            self._clock = self._clock.agreed(step, times)

    def latest(self) -> list[tuple[int, int]]:
        """Returns step and milliseconds of the latest rounds; none without a time."""
        return [] if self._clock is None else self._clock.latest

    def progress(self, step: int) -> float:
        """Returns the share of the time that is over before a step; 0 without a time.

        Until the clusters have agreed for the first time, each has its own.
        """
        if self._clock is None:
            return 0.0
        if not self._clock.agreed_step:
            own, _ = self.now(False)
            return min(1.0, own / self._clock.total_ms)
        return self._clock.progress(step)

    def is_last(self, step: int) -> bool:
        """Returns True if the run is complete after a step: taken, or restored."""
        if self._clock is None:
            return step >= self.most
        return bool(self._clock.agreed_step) and self._clock.is_over(step)

    def is_over(self, step: int) -> bool:
        """Returns True if no step follows: the run is complete, or a cluster stops it.

        All clusters have the same answer: requests travel in the heads of messages.
        """
        return self._is_stopping or self.is_last(step)
