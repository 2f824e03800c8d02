"""The time of a BERT run: its progress, its end, and requests to stop.

With --total_time a run ends at a step on which all clusters agree, from the times that
they send each other (`parallel.local_steps.clock`). A process that resumes from a
checkpoint counts on from the time there.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from nebula_jax.communication import ranks
from nebula_jax.parallel.local_steps import clock as clock_lib
from nebula_jax.parallel.local_steps import messages

EVERY = 10
"""Steps between two looks at the clock, in a run of one cluster."""
MOST_STEPS = 2**31 - 1  # optimizers count in int32


class Timer:
    """The time of one cluster's run, and what all have agreed on."""

    def __init__(self, seconds: float | None, steps: int = 0) -> None:
        """Begins now.

        Args:
          seconds: that the run may take; None if its steps count.
          steps: of the run, unless it ends by time.
        """
        self._began, self._before = time.monotonic(), 0
        self._clock = None if seconds is None else clock_lib.of_seconds(seconds)
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
            self._clock = clock_lib.Clock(**position["clock"])

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
        """Returns what a run of one cluster agrees on with itself, now and then.

        Args:
          step: just taken.
          is_requested: True if the run shall end.
        """
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
