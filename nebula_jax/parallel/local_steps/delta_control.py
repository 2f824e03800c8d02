"""The codec of local steps' deltas, chosen while a run goes on: `--delta_codec=auto`.

A delta needs not cross twice to be compared: the cluster that sends it decodes it too.
With every message go the cosine of the delta as it is and as the others decode it, and
how long the cluster waited for the round before. All clusters have the same messages,
so all write the same tape, and use the codec that `codec_control.decide` finds in the
next round. A round has the least of the clusters' figures: whoever waits for a slower
cluster does not wait for the line, and the slowest waits for the line alone.

What a cluster's clock measured is also in a file of its folder: a run that goes on
takes it from there, and so comes to the same parameters. The wait for the last round
before a stop was in a process that is gone: it counts as the one before it.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.communication import ranks
from nebula_jax.parallel import codec_control, codec_tape, readings

FILE = "waits.jsonl"
WAITS = 0.02
"""Share of the time between two rounds that a cluster may wait without the line being
what it waits for."""
MILLIONTHS = 1e6
FIGURES = 2
MOST = 2**32 - 1
MOST_COSINE = int((1.0 + codec_tape.MOST_COSINE) * MILLIONTHS)
Now = Callable[[], float]


def spec() -> jax.ShapeDtypeStruct:
    """Returns the spec of what a message has for the choice: [2] uint32.

    The cosine plus 1, and the wait over WAITS, both in millionths.
    """
    return jax.ShapeDtypeStruct((FIGURES,), jnp.uint32)


def check(figures: np.ndarray) -> None:
    """Checks what a message of another cluster has for the choice.

    Args:
      figures: as `spec`.

    Raises:
      ValueError: if it cannot be.
    """
    if int(figures[0]) > MOST_COSINE:
        raise ValueError(f"a cosine of {int(figures[0]) / MILLIONTHS - 1.0:.3f}")


class Choice:
    """The choice in one cluster; rounds are counted from 1."""

    def __init__(
        self,
        sizes: Sequence[int],
        quality: float,
        folder: pathlib.Path | None = None,
        now: Now = time.perf_counter,
    ) -> None:
        """Begins with the gentlest codec.

        Args:
          sizes: bytes of a message by each codec of the ladder, the gentlest first.
          quality: smallest cosine that is good.
          folder: of the cluster, for what its clock measured.
          now: a clock, in seconds.
        """
        # A wait goes with the message of the round after.
        policy = codec_control.Policy(1, 1, quality, (tuple(sizes), (0,)), lag=1)
        self._tape = codec_tape.Tape(policy)
        self._readings = readings.Readings(None if folder is None else folder / FILE)
        self._goes_on = False
        self._now, self._began, self._waited = now, now(), 0.0

    def go_on(self, rows: Sequence[Sequence[float]] | None) -> None:
        """Goes on from what `rows` was when a checkpoint was saved; None at step 0.

        Raises:
          errors.NebulaError: if it is no tape of this rule.
        """
        self._tape.go_on(np.asarray(rows or [], np.float32))
        self._goes_on = bool(rows)
        self._readings.go_on(is_new=rows is None)

    @property
    def rows(self) -> list[list[float]]:
        """The tape, for a checkpoint and for a summary."""
        found: list[list[float]] = self._tape.rows.tolist()
        return found

    def option(self, number: int) -> int:
        """Returns the number of the codec of a round."""
        return self._tape.rungs(number).forward

    @contextlib.contextmanager
    def waiting(self) -> Any:
        """Counts the time within as waiting for the others."""
        begin = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - begin

    def figures(self, number: int, cosine: float) -> np.ndarray:
        """Returns what this cluster's message of a round has for the choice, as `spec`.

        Args:
          number: of the round.
          cosine: of its delta, as it is and as it is decoded.
        """
        now = self._now()
        rest = max(now - self._began - self._waited, 1 / MILLIONTHS)
        waits = self._waited / rest / WAITS
        self._began, self._waited = now, 0.0
        if self._goes_on:
            waits, self._goes_on = self._tape.probes[-1].line_bound, False
        waits = self._readings.of(number, waits)
        # The file is the root's, and so is the clock.
        waits = float(
            np.frombuffer(
                ranks.bytes_from_root(np.float64(waits).tobytes()), np.float64
            )[0]
        )
        self._readings.write([number, waits])
        pair = np.nan_to_num(np.asarray([1.0 + cosine, waits]) * MILLIONTHS)
        return np.clip(pair, 0, [MOST_COSINE, MOST]).astype(np.uint32)

    def write(self, number: int, figures: Sequence[np.ndarray]) -> None:
        """Writes a round onto the tape.

        Args:
          number: of the round.
          figures: what the messages of all clusters have, as `spec`; see `check`.

        Raises:
          ValueError: if it cannot follow.
        """
        cosine, waits = np.min(np.asarray(figures, np.float64), axis=0) / MILLIONTHS
        rungs = self._tape.rungs(number)
        probe = codec_control.Probe(number, rungs, cosine - 1.0, 1.0, waits)
        self._tape.write(codec_tape.of_row(codec_tape.as_row(probe)))
