"""The tape of a choice of codecs: the probes of a run, and the rungs that follow.

Both sides write the same one, and keep it in their checkpoints: what is on it is not
measured again, and so a run that goes on has the rungs that it had.
"""

import bisect

import numpy as np

from nebula_jax import errors
from nebula_jax.parallel import codec_control
from nebula_jax.parallel.codec_control import Policy, Probe, Rungs

FIGURES = 6  # of a probe
MOST_COSINE = 1.001
"""A cosine in float32 may exceed 1 by its rounding."""


def as_row(probe: Probe) -> np.ndarray:
    """Returns a probe as [6] float32, for a line and for a checkpoint."""
    figures = *probe.rungs, probe.forward, probe.backward, probe.line_bound
    return np.asarray([probe.step, *figures], np.float32)


def of_row(row: np.ndarray) -> Probe:
    """Returns the probe that `as_row` made a row of.

    Raises:
      ValueError: if its step or a rung is no whole number.
    """
    step, forward, backward, *figures = row.tolist()
    if not all(each.is_integer() for each in (step, forward, backward)):
        raise ValueError(f"a probe of step {step} with rungs {forward}, {backward}")
    return Probe(int(step), Rungs(int(forward), int(backward)), *figures)


class Tape:
    """The probes of a run, and the rungs of each step that follow from them.

    Both sides have the same one; it is saved with the parameters.
    """

    def __init__(self, policy: Policy) -> None:
        """Begins without a probe."""
        self.policy = policy
        self._begin()

    def _begin(self) -> None:
        self.probes: list[Probe] = []
        self._history = codec_control.History()
        self._decided = [Rungs()]  # after so many probes
        self._next = codec_control.next_probe(self.policy, self._history)

    def rungs(self, step: int) -> Rungs:
        """Returns the rungs that are in use in a step."""
        arrived = bisect.bisect_right(
            self.probes, step - self.policy.delay, key=lambda probe: probe.step
        )
        return self._decided[arrived]

    @property
    def following(self) -> Rungs:
        """The rungs that follow from the last probe."""
        return self._decided[-1]

    def is_probed(self, step: int) -> bool:
        """Returns True if a micro-batch of the next step crosses twice."""
        return step == self._next

    def write(self, probe: Probe) -> None:
        """Adds what was found in a step.

        Raises:
          ValueError: if it is not the next probe, its rungs were not in use, or a
            number cannot be.
        """
        if probe.step != self._next:
            raise ValueError(
                f"a probe of step {probe.step} where one of step {self._next} follows"
            )
        if probe.rungs != self.rungs(probe.step):
            raise ValueError(
                f"a probe of step {probe.step} with {probe.rungs}, where the tape has"
                f" {self.rungs(probe.step)}"
            )
        cosines = probe.forward, probe.backward
        if not all(abs(each) <= MOST_COSINE for each in cosines):
            raise ValueError(f"a probe of step {probe.step} has cosines {cosines}")
        if not (np.isfinite(probe.line_bound) and probe.line_bound >= 0):
            raise ValueError(
                f"a probe of step {probe.step} has a ratio of times of"
                f" {probe.line_bound}"
            )
        self.probes.append(probe)
        self._history.add(probe)
        self._decided.append(codec_control.decide(self.policy, self._history))
        self._next = codec_control.next_probe(self.policy, self._history)

    @property
    def rows(self) -> np.ndarray:
        """The tape for a checkpoint: [probes, 6] float32."""
        return np.asarray(list(map(as_row, self.probes)), np.float32).reshape(
            -1, FIGURES
        )

    def resume(self, rows: np.ndarray) -> None:
        """Takes the probes of a checkpoint, in place of those so far.

        Args:
          rows: as `rows`.

        Raises:
          errors.NebulaError: if they do not follow from each other.
        """
        self._begin()
        try:
            for row in rows.reshape(-1, FIGURES):
                self.write(of_row(row))
        except ValueError as error:
            raise errors.NebulaError(
                f"the checkpoint's choice of codecs does not follow this rule: {error};"
                " it is of another version or of other settings. Begin anew, with"
                " another workdir"
            ) from None
