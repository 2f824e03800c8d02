"""A planner: the time of a step of M3's clusters, before any is started.

Section 3.3, Fig. 6 and 7. `time_of` runs the pace of a run in virtual time: the loops
are those of the clusters (`pace.follow`, `pace.Lead`), but computing is a number of
seconds, and sending a number of bytes on a line that is a queue with a rate and a
delay. No device is needed.

    run = M3((Compute(0.2, 0.4),), Compute(0.5, 1.0), (LINE,), 5_000_000, window=2)
    time_of(run).seconds

Not in the model: what varies from step to step (a text's lengths, lost
packets), TCP's own dynamics, evaluations and checkpoints, and the limits of what a link
keeps unsent. Units: seconds, bytes.

K generators, n micro-batches of a generator's step (fan-out).
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nebula_jax.communication.wire import frames
from nebula_jax.parallel import pace

TOKEN_BYTES = frames.frame_bytes(frames.StepDone)
STEPS = 48  # that are averaged at least: a pattern over several steps has room


@dataclasses.dataclass(frozen=True)
class Compute:
    """The time that a part of the model takes on its cluster's devices."""

    forward: float
    """Seconds of a micro-batch."""
    backward: float
    """Seconds of a micro-batch."""
    update: float = 0.0
    """Seconds once a step, whatever the batch: the optimizer, the start of a step."""
    cores: float = 1.0
    """Cores that it keeps busy, where clusters share a machine's."""

    @property
    def micro_batch(self) -> float:
        """The seconds of a micro-batch, forward and backward."""
        return self.forward + self.backward

    def scaled(self, factor: float) -> "Compute":
        """Returns what takes `factor` times as long."""
        return Compute(
            factor * self.forward,
            factor * self.backward,
            factor * self.update,
            self.cores,
        )


@dataclasses.dataclass(frozen=True)
class Line:
    """One direction of a line: bytes leave one after the other, and arrive later."""

    bytes_per_second: float = 0.0
    """0 for unlimited."""
    delay_seconds: float = 0.0
    """One way."""

    def seconds(self, count: float) -> float:
        """Returns how long the line is busy with so many bytes."""
        return count / self.bytes_per_second if self.bytes_per_second else 0.0


@dataclasses.dataclass(frozen=True)
class Lines:
    """A line in both directions."""

    up: Line = Line()
    """To the cluster that leads, the discriminator."""
    down: Line = Line()
    """Back."""


@dataclasses.dataclass(frozen=True)
class M3:
    """A run of Scenario I: K generators, each on its own line, and one discriminator.

    A generator's step is `fan_out` micro-batches, each of which leaves once it is made;
    the discriminator's is all of them, and a step token.
    """

    generators: Sequence[Compute]
    """K, one micro-batch of each."""
    discriminator: Compute
    """One micro-batch of each generator; a step has `fan_out` times as many."""
    lines: Sequence[Lines]
    """K, one for each generator."""
    message_bytes: float
    """A micro-batch on the line."""
    window: int = 2
    """Steps that a generator may be ahead."""
    fan_out: int = 1
    """n, micro-batches of a generator's step."""


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of a step in the long run, and where each part spends it."""

    seconds: float
    """From one step to the next."""
    busy: Mapping[str, float]
    """Seconds a step that a part works: `generator 0`, `discriminator`, `line up 0`,
    `line down 0`."""

    def waits(self, part: str) -> float:
        """Returns the seconds a step that a part has nothing to do."""
        return max(0.0, self.seconds - self.busy[part])


def time_of(run: M3, cores: float | None = None, steps: int = STEPS) -> Time:
    """Computes the time of a step.

    Args:
      run: the clusters, their lines, and how they keep pace.
      cores: of one machine that all clusters share; while more are wanted, everything
        that computes is slowed down alike. None if each has its own machine.
      steps: to average over, after those in which the run fills; rounded up to whole
        bursts. Where a window does not cover the round trip, a turn is a burst of
        `window` + 1 steps and a pause.

    Returns:
      Time.
    """
    burst = run.window + 1
    steps = math.ceil(steps / burst) * burst
    first = 8 + 2 * run.window
    world = _World(cores)
    # A follower must not be at its end.
    world.run(_m3(run, world, first + steps + burst))
    (begin, before), (end, after) = world.marks[first], world.marks[first + steps]
    busy = {name: (after[name] - before[name]) / steps for name in after}
    return Time((end - begin) / steps, busy)


class _Way:
    """One direction of a line, and what arrived over it: a FIFO in virtual time."""

    def __init__(self, world: "_World", name: str, line: Line) -> None:
        self._world, self._name, self._line = world, name, line
        self._idle_from = 0.0
        self._arrivals: dict[Any, float] = {}

    def send(self, tag: Any, count: float) -> None:
        seconds = self._line.seconds(count)
        self._idle_from = max(self._idle_from, self._world.now) + seconds
        self._world.busy[self._name] += seconds
        self._arrivals[tag] = self._idle_from + self._line.delay_seconds

    def arrival(self, tag: Any) -> float | None:
        """Returns when something arrives; None while it has not been sent."""
        return self._arrivals.get(tag)


_Work = tuple[float, float]  # seconds, cores
_Wait = tuple[_Way, Any]  # until this tag has arrived
_Process = Iterator[_Work | _Wait]


class _World:
    """A virtual time, in which processes compute, or wait for an arrival."""

    def __init__(self, cores: float | None) -> None:
        self.now = 0.0
        self.busy: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.marks: list[tuple[float, Mapping[str, float]]] = []
        self._cores = cores

    def mark(self) -> None:
        """Records the end of a step."""
        self.marks.append((self.now, dict(self.busy)))

    def run(self, processes: Mapping[str, _Process]) -> None:
        """Runs processes to their end."""
        left: dict[str, float] = {}  # seconds of computing
        cores: dict[str, float] = {}
        waiting: dict[str, _Wait] = {}
        ready = list(processes)
        while True:
            for name in ready:
                request = next(processes[name], None)
                if request is None:
                    continue
                what, more = request
                if isinstance(what, _Way):
                    waiting[name] = what, more
                else:
                    left[name], cores[name] = what, more
            wanted = sum(cores[name] for name in left)
            share = min(1.0, self._cores / wanted) if self._cores and wanted else 1.0
            ends = {name: self.now + each / share for name, each in left.items()}
            for name, (way, tag) in waiting.items():
                if (when := way.arrival(tag)) is not None:
                    ends[name] = max(when, self.now)
            if not ends:
                return
            end = min(ends.values())
            for name in left:
                self.busy[name] += end - self.now
                left[name] -= (end - self.now) * share
            self.now = end
            ready = [name for name, when in ends.items() if when <= end]
            for name in ready:
                left.pop(name, None)
                waiting.pop(name, None)


class _Link:
    """A link in virtual time, as `pace` sees it, of a follower or the leader."""

    stop_step = None
    peer = frames.Hello("", "", {})

    def __init__(self, down: _Way) -> None:
        self.down, self.needed = down, 0

    def wait_for_step(self, step: int) -> None:
        """Takes what is to be waited for: the process does it, in virtual time."""
        self.needed = step

    def step_done(self, step: int) -> None:
        self.down.send(step, TOKEN_BYTES)

    def stop(self, step: int = 0) -> None:
        raise AssertionError("nothing stops a plan")


def _never() -> bool:
    return False


def _m3(run: M3, world: _World, last: int) -> dict[str, _Process]:
    """Makes the processes of M3: `experiments/m3/generator.py`, `discriminator.py`."""
    numbers = range(len(run.generators))
    ups = [_Way(world, f"line up {k}", run.lines[k].up) for k in numbers]
    links = [_Link(_Way(world, f"line down {k}", run.lines[k].down)) for k in numbers]

    def generator(k: int) -> _Process:
        compute = run.generators[k]
        for step in pace.follow(links[k], 0, last, run.window, _never):
            if links[k].needed > 0:
                yield links[k].down, links[k].needed
            for number in range(run.fan_out):
                seconds = compute.micro_batch
                if run.fan_out == 1:  # one program: the tokens come with the new state
                    seconds += compute.update
                yield seconds, compute.cores
                ups[k].send((step, number), run.message_bytes)
            if run.fan_out > 1:
                yield compute.update, compute.cores

    def discriminator() -> _Process:
        compute = run.discriminator
        lead = pace.Lead(links, 0, last, run.window, _never, lambda line: None)
        for step in lead:
            for up in ups:
                for number in range(run.fan_out):
                    yield up, (step, number)
            yield run.fan_out * compute.micro_batch + compute.update, compute.cores
            lead.done(step)
            world.mark()

    processes = {f"generator {k}": generator(k) for k in numbers}
    return processes | {"discriminator": discriminator()}
