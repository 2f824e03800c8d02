"""The progress of a run that ends by the clock: one line that all clusters agree on.

A schedule by time needs every step's progress before the step, and the same in all
clusters, whose clocks differ. So now and then they agree on how long the run has
lasted (the largest of their times); between two such moments progress is a straight
line through the steps. A run that goes on from a checkpoint goes on from its time.

    24hBERT (Izsak et al. 2021) has such a schedule, for one machine.
"""

import dataclasses
from collections.abc import Sequence

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
        """Returns the share of the run that is over before a step; at most 1.

        Args:
          step: that is to be taken, counted from 1.
        """
        steps = max(0, step - 1 - self.agreed_step)
        return min(1.0, (self.agreed_ms + steps * self.per_step_ms) / self.total_ms)

    def is_over(self, step: int) -> bool:
        """Returns True if no step comes after `step`."""
        return self.progress(step + 1) >= 1.0

    def agreed(self, step: int, milliseconds: Sequence[int]) -> "Clock":
        """Returns the clock after the clusters have exchanged their times.

        Args:
          step: after which each has measured its own.
          milliseconds: that the run has lasted, by each.
        """
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


def of_seconds(seconds: float) -> Clock:
    """Returns the clock of a run that is to be done, and saved, after so long."""
    return Clock(total_ms=max(1, round(1000 * seconds * (1 - RESERVE))))
