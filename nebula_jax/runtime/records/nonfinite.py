"""Steps whose loss or gradient is not finite: skipped and counted, or the end of a run.

A training step finds out by itself, in its program, and then leaves its state as it was
(`TrainState.apply_gradients`); here a cluster counts such steps and decides.
"""

import math
from collections.abc import Callable, Mapping

import jax

from nebula_jax import errors
from nebula_jax.runtime.life import process


class NonfiniteError(errors.NebulaError):
    """A loss or a gradient that is not finite, once more than --allow_nonfinite."""


class Skips:
    """The steps of one cluster that were skipped."""

    def __init__(
        self,
        cluster: str,
        allowed: int,
        count: int = 0,
        record: Callable[[int, int], None] = lambda step, count: None,
    ) -> None:
        """Begins to count.

        Args:
          cluster: its name.
          allowed: steps that may be skipped in the whole run.
          count: steps that were skipped before this process started.
          record: is given the step and the count at every skip.
        """
        self._cluster, self._allowed, self._record = cluster, allowed, record
        self.count = count
        """Steps that were skipped so far."""

    def take(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the outcome of a step; waits for it.

        Args:
          step: counted from 1.
          metrics: of the step, with `loss`; `is_finite` is False if it was skipped.

        Raises:
          NonfiniteError: if more steps were skipped than are allowed.
        """
        if metrics.get("is_finite", True):
            return
        loss = float(metrics["loss"])
        what = f"{self._cluster}: the loss of step {step} is {loss}"
        if math.isfinite(loss):
            what = f"{self._cluster}: step {step} has the loss {loss:.4g}, but its"
            what += " gradient or the parameters after it are not finite"
        if self.count >= self._allowed:
            raise NonfiniteError(
                f"{what}; nothing after it is saved (allow_nonfinite={self._allowed}"
                " is the number of such steps that are skipped)"
            )
        self.count += 1
        self._record(step, self.count)
        process.message(f"{what}: skipped, {self.count} of {self._allowed}")
