"""The choice of codecs while a run goes on, by what they do to gradients.

Each direction of a cut has a schedule of codecs, the least lossy first. Every P steps
one micro-batch crosses twice, by the codecs in use and by the least lossy ones; each
side compares the gradients that it would train with, and what both found is a Probe.
From the probes `decide` finds the levels in use from the next step on: the cheapest
that change gradients little, and only while the line is what a step waits for. So the
step at which compression begins (Fig. 10) is found as well. While the probes call for
levels that are new, they come more often (`next_probe`).

A decision is a pure function of the probes. Both sides keep them in a DecisionLog, and
it in their checkpoints; what one side's clock has shown since is in a file
(`Readings`). So a run that resumes has the levels that it had.
"""

import bisect
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import ranks

FORWARD, BACKWARD = WAYS = (0, 1)
BAD = 2
"""Probes in a row below the quality after which a gentler level is used."""
GOOD = 4
"""Probes in a row, not below it, after which a harder one is."""
SOONER = 8
"""Probes in the time of one, while they call for levels that were not left before."""
FIGURES = 6  # of a probe
MOST_COSINE = 1.001
"""A cosine in float32 may exceed 1 by its rounding."""
ANEW: list[float] = []
"""The row that is written where a run begins anew; those above it do not count."""


class Levels(NamedTuple):
    """The places on the schedules of both directions, 0 for the least lossy."""

    forward: int = 0
    backward: int = 0


class Probe(NamedTuple):
    """The figures of a step.

    step: of the probe.
    levels: in use then.
    forward: cosine of the back's gradients, with the hidden states as they came and as
      the least lossy codec brings them.
    backward: cosine of the front's gradients, likewise; what was lost on the way there
      counts as well.
    line_bound: seconds that the busier direction of the line takes for a micro-batch,
      over those that the busier side computes for it; above 1 a step waits for the
      line.
    """

    step: int
    levels: Levels
    forward: float
    backward: float
    line_bound: float

    @property
    def row(self) -> np.ndarray:
        """The probe as [6] float32, for a line and for a checkpoint."""
        return np.asarray([self.step, *self.levels, *self[2:]], np.float32)


def of_row(row: np.ndarray) -> Probe:
    """Returns the probe of a `Probe.row`.

    Raises:
      ValueError: if its step or a level is no whole number.
    """
    step, forward, backward, *figures = row.tolist()
    if not all(each.is_integer() for each in (step, forward, backward)):
        raise ValueError(f"a probe of step {step} with levels {forward}, {backward}")
    return Probe(int(step), Levels(int(forward), int(backward)), *figures)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rule.

    every: P, steps, 2 or more; an eighth of it while new levels are sought.
    quality: smallest cosine that is good.
    sizes: bytes of a micro-batch by the levels of each direction.
    """

    every: int
    quality: float
    sizes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def soon(self) -> int:
        """The steps between two probes while new levels are sought."""
        return min(self.every, max(2, self.every // SOONER))

    def is_good(self, probe: Probe, way: int) -> bool:
        """Returns True if a direction's cosine is good."""
        return (probe.forward, probe.backward)[way] >= self.quality


class History:
    """The probes so far, as far as decisions depend on them.

    here: the last ones, all at the same levels.
    left: the last one at each levels that were left, and the levels that followed.
    """

    def __init__(self, probes: Iterable[Probe] = ()) -> None:
        """Adds probes in their order."""
        self.here: list[Probe] = []
        self.left: list[tuple[Probe, Levels]] = []
        for probe in probes:
            self.add(probe)

    def add(self, probe: Probe) -> None:
        """Adds the next probe."""
        if self.here and self.here[-1].levels != probe.levels:
            self.left.append((self.here[-1], probe.levels))
            self.here = []
        self.here.append(probe)


def decide(policy: Policy, history: History) -> Levels:
    """Returns the levels that follow from the probes so far.

    - `BAD` probes in a row below the quality: one level gentler. The front's gradients
      have the errors of both directions, the back's those of the forward one: so that
      one comes first, and where the backward one is at its least lossy, it is to blame
      for both.
    - `GOOD` probes in a row of quality, in all of which the step waits for the line:
      one level harder, in the direction of which more crosses, or in both.
    - As many in none of which it waits: one level gentler, since there is room; in the
      other direction, if that of which more crosses is at its least lossy.

    Each time that levels were left, the harder ones as bad or the gentler ones because
    the line was waited for, the probes that it takes to try them again are doubled: so
    changes at the edge of two levels become rare.
    """
    here = history.here
    if not here:
        return Levels()
    now = here[-1].levels
    for way in WAYS:
        gentler, last = _less_lossy(policy, now, way), here[-BAD:]
        is_enough = len(last) == BAD and gentler != now
        if is_enough and not any(policy.is_good(each, way) for each in last):
            return gentler
    for by in (1, -1):
        wanted = _further(policy, now, by)
        needed = GOOD * 2 ** _left(policy, history, wanted, -by)
        last = here[max(0, len(here) - needed) :]
        is_enough = len(last) == needed and wanted != now
        if is_enough and all(_is_due(policy, each, by) for each in last):
            return wanted
    return now


def next_probe(policy: Policy, history: History) -> int:
    """Returns the step of the next probe.

    It comes `every` steps after the last one; sooner at the beginning of the run, if
    the last one calls for gentler levels, and if it calls for harder ones, or finds
    room for gentler ones, that were not left before.
    """
    if not history.here:
        return policy.soon
    last = history.here[-1]
    now = last.levels
    seeks = decide(policy, history) != now or any(
        not policy.is_good(last, way) and _less_lossy(policy, now, way) != now
        for way in WAYS
    )
    for by in (1, -1):
        wanted = _further(policy, now, by)
        is_new = wanted != now and not _left(policy, history, wanted, -by)
        seeks |= is_new and _is_due(policy, last, by)
    return last.step + (policy.soon if seeks else policy.every)


def _is_due(policy: Policy, probe: Probe, by: int) -> bool:
    """Returns True if a probe calls for fewer bytes (by 1), or has room for more."""
    if by < 0:
        return probe.line_bound <= 1
    return all(policy.is_good(probe, way) for way in WAYS) and probe.line_bound > 1


def _less_lossy(policy: Policy, levels: Levels, way: int) -> Levels:
    """Returns the levels that follow where the cosine of a direction is bad."""
    # The backward cosine has the errors of both directions.
    blamed = (FORWARD,) if way == FORWARD or not levels.backward else (BACKWARD,)
    return _moved(policy, levels, blamed, -1)


def _further(policy: Policy, levels: Levels, by: int) -> Levels:
    """Returns the levels that follow where fewer bytes, or more, are called for."""
    sizes = [policy.sizes[way][level] for way, level in enumerate(levels)]
    # A full-duplex line waits for the direction of which more crosses.
    wider = [way for way in WAYS if sizes[way] == max(sizes)]
    moved = _moved(policy, levels, wider, by)
    is_stuck = moved == levels and by < 0
    return _moved(policy, levels, WAYS, by) if is_stuck else moved


def _moved(policy: Policy, levels: Levels, ways: Sequence[int], by: int) -> Levels:
    """Returns the levels one further, as far as the schedules go."""
    moved = list(levels)
    for way in ways:
        moved[way] = min(len(policy.sizes[way]) - 1, max(0, levels[way] + by))
    return Levels(*moved)


def _left(policy: Policy, history: History, levels: Levels, by: int) -> int:
    """Returns how often levels were left: for gentler (by -1) as bad, or harder."""
    count = 0
    for before, after in history.left:
        if before.levels == levels:
            apart = sum(after) - sum(levels)
            was_bad = not all(policy.is_good(before, way) for way in WAYS)
            count += apart > 0 if by > 0 else apart < 0 and was_bad
    return count


class DecisionLog:
    """The probes of a run, and the levels of each step that follow from them.

    Both sides have the same one; it is saved with the parameters.
    """

    def __init__(self, policy: Policy) -> None:
        """Begins without a probe."""
        self.policy = policy
        self._begin()

    def _begin(self) -> None:
        self.probes: list[Probe] = []
        self._history = History()
        self._decided = [Levels()]  # after so many probes
        self._next = next_probe(self.policy, self._history)

    def levels(self, step: int) -> Levels:
        """Returns the levels that are in use in a step."""
        # A decision arrives with its own step: it counts from the next one on.
        return self._decided[
            bisect.bisect_left(self.probes, step, key=lambda probe: probe.step)
        ]

    @property
    def following(self) -> Levels:
        """The levels that follow from the last probe."""
        return self._decided[-1]

    def is_probed(self, step: int) -> bool:
        """Returns True if a micro-batch of the next step crosses twice."""
        return step == self._next

    def write(self, probe: Probe) -> None:
        """Adds what was found in a step.

        Raises:
          ValueError: if it is not the next probe, its levels were not in use, or a
            number cannot be.
        """
        about, levels = f"a probe of step {probe.step}", self.levels(probe.step)
        cosines = probe.forward, probe.backward
        if probe.step != self._next:
            raise ValueError(f"{about} where one of step {self._next} follows")
        if probe.levels != levels:
            raise ValueError(
                f"{about} with {probe.levels}, where the decision log has {levels}"
            )
        if not all(abs(each) <= MOST_COSINE for each in cosines):
            raise ValueError(f"{about} has cosines {cosines}")
        if not 0 <= probe.line_bound < float("inf"):
            raise ValueError(f"{about} has a ratio of times of {probe.line_bound}")
        self.probes.append(probe)
        self._history.add(probe)
        self._decided.append(decide(self.policy, self._history))
        self._next = next_probe(self.policy, self._history)

    @property
    def rows(self) -> list[list[float]]:
        """The decision log for a checkpoint: `Probe.row` of each probe."""
        return [probe.row.tolist() for probe in self.probes]

    def resume(self, rows: Iterable[Sequence[float]]) -> None:
        """Takes the probes of a checkpoint, in place of those so far.

        Raises:
          errors.NebulaError: if they do not follow from each other.
        """
        self._begin()
        try:
            for row in rows:
                self.write(of_row(np.asarray(row, np.float32)))
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
        """Begins without readings; of the file, or of none if nothing is to be kept."""
        self._path = path
        self._kept: dict[int, float] = {}

    def resume(self, is_new: bool) -> None:
        """Takes the readings of the file, unless the run begins anew."""
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
