"""The choice of codecs while a run goes on, by what they do to gradients.

Each direction of a cut has a ladder of codecs, the least lossy first. Every P steps one
micro-batch crosses twice, by the codecs in use and by the least lossy ones; each side
compares the gradients that it would train with, and what both found is a Probe. From
the probes so far `decide` finds the rungs that are in use from a later step on: the
cheapest that change gradients little, and only while the line is what a step waits for.
It begins at the least lossy: so the step at which compression begins (Fig. 10) is found
as well. While the probes call for rungs that are new, they come more often
(`next_probe`).

A decision is a pure function of the probes; clocks enter through these alone
(`codec_tape`).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WAYS = ("forward", "backward")
SOONER = 8
"""Probes in the time of one, while they call for rungs that were not left before."""


class Rungs(NamedTuple):
    """The places on the ladders of both directions, 0 for the least lossy."""

    forward: int = 0
    backward: int = 0


class Probe(NamedTuple):
    """The figures of a step.

    step: of the probe.
    rungs: in use then.
    forward: cosine of the back's gradients, with the hidden states as they came and as
      the least lossy codec brings them.
    backward: cosine of the front's gradients, likewise; what was lost on the way there
      counts as well.
    line_bound: seconds that the busier direction of the line takes for a micro-batch,
      over those that the busier side computes for it; above 1 a step waits for the
      line.
    """

    step: int
    rungs: Rungs
    forward: float
    backward: float
    line_bound: float


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rule.

    every: P, steps; an eighth of it while new rungs are sought.
    delay: steps from a probe to what follows from it; the decision has to arrive.
    quality: smallest cosine that is good.
    bad: probes in a row below it, after which a gentler rung is used.
    good: probes in a row, not below it, after which a harder one is.
    sizes: bytes of a micro-batch by the rungs of each direction.
    """

    every: int
    delay: int
    quality: float
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    bad: int = 2
    good: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.delay <= self.every:
            raise ValueError(
                f"a decision comes after 1 to {self.every} steps, with the next"
                f" probe at the latest, not after {self.delay}"
            )

    @property
    def soon(self) -> int:
        """The steps between two probes while new rungs are sought."""
        return min(self.every, max(self.delay + 1, self.every // SOONER))


class History:
    """The probes so far, as far as decisions depend on them.

    here: the last ones, all at the same rungs.
    left: the last one at each rungs that were left, and the rungs that followed.
    """

    def __init__(self, probes: Iterable[Probe] = ()) -> None:
        """Adds probes in their order."""
        self.here: list[Probe] = []
        self.left: list[tuple[Probe, Rungs]] = []
        for probe in probes:
            self.add(probe)

    def add(self, probe: Probe) -> None:
        """Adds the next probe."""
        if self.here and self.here[-1].rungs != probe.rungs:
            self.left.append((self.here[-1], probe.rungs))
            self.here = []
        self.here.append(probe)


def decide(policy: Policy, history: History) -> Rungs:
    """Returns the rungs that follow from the probes so far.

    - `bad` probes in a row below `quality`: one rung gentler. The front's gradients
      have the errors of both directions, the back's those of the forward one: so that
      one comes first, and where the backward one is at its least lossy, it is to blame
      for both.
    - `good` probes in a row of quality, in all of which the step waits for the line:
      one rung harder, in the direction of which more crosses, or in both.
    - As many in none of which it waits: one rung gentler, since there is room; in the
      other direction, if that of which more crosses is at its least lossy.

    Each time that rungs were left, the harder ones as bad or the gentler ones because
    the line was waited for, the probes that it takes to try them again are doubled: so
    changes at the edge of two rungs become rare.

    Args:
      history: of the run; all probes have the rungs that followed from those before.
    """
    here = history.here
    if not here:
        return Rungs()
    now = here[-1].rungs
    for way in WAYS:
        gentler, last = _gentler(policy, now, way), here[-policy.bad :]
        is_enough = len(last) == policy.bad and gentler != now
        if is_enough and not any(_is_good(policy, each, way) for each in last):
            return gentler
    for by, is_due in _MOVES:
        wanted = _further(policy, now, by)
        needed = policy.good * 2 ** _left(policy, history, wanted, -by)
        last = here[max(0, len(here) - needed) :]
        is_enough = len(last) == needed and wanted != now
        if is_enough and all(is_due(policy, each) for each in last):
            return wanted
    return now


def next_probe(policy: Policy, history: History) -> int:
    """Returns the step of the next probe.

    It comes `every` steps after the last one; sooner at the beginning of the run, if
    the last one calls for gentler rungs, and if it calls for harder ones, or finds room
    for gentler ones, that were not left before.

    Args:
      history: so far.
    """
    if not history.here:
        return policy.soon
    last, wanted = history.here[-1], decide(policy, history)
    seeks = wanted != last.rungs or any(
        not _is_good(policy, last, way)
        and _gentler(policy, last.rungs, way) != last.rungs
        for way in WAYS
    )
    for by, is_due in _MOVES:
        wanted = _further(policy, last.rungs, by)
        seeks |= (
            wanted != last.rungs
            and is_due(policy, last)
            and not _left(policy, history, wanted, -by)
        )
    return last.step + (policy.soon if seeks else policy.every)


def _is_good(policy: Policy, probe: Probe, way: str) -> bool:
    cosine: float = getattr(probe, way)
    return cosine >= policy.quality


def _calls_for_less(policy: Policy, probe: Probe) -> bool:
    is_good = all(_is_good(policy, probe, way) for way in WAYS)
    return is_good and probe.line_bound > 1


def _has_room(policy: Policy, probe: Probe) -> bool:
    del policy
    return probe.line_bound <= 1


_MOVES = ((1, _calls_for_less), (-1, _has_room))
"""Rungs up or down the ladder, and whether a probe calls for it."""


def _wider(policy: Policy, rungs: Rungs) -> tuple[str, ...]:
    """Returns the direction of which more crosses: a full-duplex line waits for it."""
    sizes = [policy.sizes[place][rung] for place, rung in enumerate(rungs)]
    return tuple(
        way for way, size in zip(WAYS, sizes, strict=True) if size == max(sizes)
    )


def _gentler(policy: Policy, rungs: Rungs, way: str) -> Rungs:
    """Returns the rungs that follow where the cosine of a direction is bad."""
    for each in _TO_BLAME[way]:
        moved = _moved(policy, rungs, (each,), -1)
        if moved != rungs:
            return moved
    return rungs


_TO_BLAME = {"forward": ("forward",), "backward": ("backward", "forward")}
"""The directions whose errors a cosine has, in the order in which they are tried."""


def _further(policy: Policy, rungs: Rungs, by: int) -> Rungs:
    """Returns the rungs that follow where fewer bytes, or more, are called for."""
    moved = _moved(policy, rungs, _wider(policy, rungs), by)
    is_stuck = moved == rungs and by < 0
    return _moved(policy, rungs, WAYS, by) if is_stuck else moved


def _moved(policy: Policy, rungs: Rungs, ways: Sequence[str], by: int) -> Rungs:
    """Returns the rungs one further, as far as the ladders go."""
    tops = {way: len(policy.sizes[place]) - 1 for place, way in enumerate(WAYS)}
    return rungs._replace(
        **{way: min(tops[way], max(0, getattr(rungs, way) + by)) for way in ways}
    )


def _left(policy: Policy, history: History, rungs: Rungs, by: int) -> int:
    """Returns how often these rungs were left: for gentler ones as bad, or for harder.

    Args:
      policy, history: as of `decide`.
      by: -1 for gentler, 1 for harder.
    """
    count = 0
    for before, after in history.left:
        if before.rungs != rungs:
            continue
        apart = sum(after) - sum(before.rungs)
        was_bad = not all(_is_good(policy, before, way) for way in WAYS)
        count += apart > 0 if by > 0 else apart < 0 and was_bad
    return count
