"""Which training pairs make up which step: all of them, and some alone at the end."""

import numpy as np

from experiments import clusters, xnli_setup, xnli_text
from nebula_jax.data import schedule


class Batches:
    """The training batches of a run, counted from 0."""

    def __init__(self, part: xnli_text.Part):
        """Goes by --epochs or --steps, --finish_on and --finish_epochs.

        Args:
          part: the training pairs.

        Raises:
          FlagError: if no pair is one of --finish_on.
        """
        size, seed = clusters.BATCH_SIZE.value, clusters.SEED.value
        self._all = schedule.Schedule(part.buckets, size, seed)
        self._chosen = np.zeros(0, np.int64)
        last_steps = 0
        if xnli_setup.FINISH_ON.value:
            beginnings = tuple(xnli_setup.FINISH_ON.value)
            is_last = [name.startswith(beginnings) for name in part.rows.ids]
            self._chosen = np.flatnonzero(is_last)
            if not len(self._chosen):
                raise clusters.FlagError(
                    f"--finish_on={','.join(beginnings)}: no training pair's id begins"
                    " so"
                )
            self._last = schedule.Schedule(part.buckets[self._chosen], size, seed)
            epochs = xnli_setup.FINISH_EPOCHS.value
            last_steps = round(epochs * self._last.steps_per_epoch)
        self.steps = clusters.STEPS.value
        """All of them."""
        if xnli_setup.EPOCHS.value:
            first = round(xnli_setup.EPOCHS.value * self._all.steps_per_epoch)
            self.steps = max(1, first + last_steps)
        self._first_steps = max(0, self.steps - last_steps)

    def batch(self, step: int) -> schedule.Batch:
        """The pairs of step `step`, and their bucket."""
        if step < self._first_steps:
            return self._all.batch(step)
        bucket, indices = self._last.batch(step - self._first_steps)
        return schedule.Batch(bucket, self._chosen[indices])
