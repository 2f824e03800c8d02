"""The tape of a choice of codecs: the probes of a run, and the rungs that follow.

Both sides write the same one, and keep it in their checkpoints: what is on it is not
measured again, and so a run that resumes has the rungs that it had. What one side's
clock has shown since the last checkpoint is in a file of its own (`Readings`).
"""

import bisect
import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.parallel import codec_control
from nebula_jax.parallel.codec_control import Policy, Probe, Rungs

FIGURES = 6  # of a probe
MOST_COSINE = 1.001
"""A cosine in float32 may exceed 1 by its rounding."""


ANEW: list[float] = []
"""The row that is written where a run begins anew; those above it do not count."""


@jax.jit
def similarity(one: Any, other: Any) -> jax.Array:
    """Returns the cosine of two trees of arrays; -1 if one is 0 or not finite.

    Args:
      one, other: alike in structure and shapes, floating-point.

    Returns:
      [] float32.
    """

    def product(a: Any, b: Any) -> jax.Array:
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.zeros(()))

    # Each by itself: the product of two small squares is 0 in float32.
    shares = [jax.lax.rsqrt(product(each, each)) for each in (one, other)]
    cosine = product(one, other) * shares[0] * shares[1]
    return jnp.where(jnp.isfinite(cosine), cosine, -1.0)


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


class Readings:
    """The clock readings of a run by step, in a file of the cluster's folder.

    A run that resumes takes them from there instead of measuring again, and so comes to
    the same parameters. A run that begins anew does not: the line of an attempt that
    saved nothing else may have been another. The file has a JSON row for each: the
    number first, the reading last.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        """Begins without readings.

        Args:
          path: of the file; None if nothing is to be kept.
        """
        self._path = path
        self._kept: dict[int, float] = {}

    def resume(self, is_new: bool) -> None:
        """Takes the readings of the file.

        Args:
          is_new: True if the run begins anew, without a checkpoint.
        """
        if self._path is None or not self._path.is_file():
            return
        if is_new:
            self._append(ANEW)
            return
        for line in self._path.read_text().splitlines():
            # A process that is killed may leave half a line.
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row == ANEW:
                    self._kept.clear()
                    continue
                number, *_, reading = row
                self._kept[int(number)] = float(reading)

    def of(self, number: int, measured: float) -> float:
        """Returns the reading that was kept, else the one that was measured now."""
        return self._kept.get(number, measured)

    def write(self, row: Sequence[float]) -> None:
        """Keeps a reading: its number first, itself last. A kept one stays."""
        if int(row[0]) not in self._kept and self._path is not None:
            self._append(row)

    def _append(self, row: Sequence[float]) -> None:
        assert self._path is not None
        if ranks.is_root():
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps(list(row))}\n")
