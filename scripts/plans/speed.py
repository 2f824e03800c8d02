"""Speed of a device: given, or measured here on a step of a model like the run's.

The model is the run's own, with fewer layers and pieces where it is large, and as many
rows as a second allows. A step at two numbers of rows gives the time that grows with
them, and the rest: the optimizer and the start of a program.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from nebula_jax.parallel import planner
from scripts.plans import count

MOST_LAYERS, MOST_PIECES = 2, 8192
MOST_FLOP = 2e10  # of a step that is timed: at most a second on a slow laptop
TIMED_STEPS, TIMED_SECONDS = 5, 0.5


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of one device with one part of the model."""

    flops: float
    """FLOP/s, sustained, of matrix products, whatever else is computed with them."""
    update: float = 0.0
    """Seconds once a step."""
    cores: float = 1.0
    """Cores of the machine that a step keeps busy."""

    def compute(self, part: count.Part, devices: int) -> planner.Compute:
        """Returns the time of a part on devices that share its work evenly.

        Each keeps as many cores busy, and does the whole update.
        """
        rate = self.flops * devices
        return planner.Compute(
            *(part.forward / rate, part.backward / rate, self.update),
            self.cores * devices,
        )


def measure(
    step_of: Callable[[int], Callable[[], Any]],
    flops_of: Callable[[int], float],
    rows: int,
    parameters: float,
) -> Speed:
    """Measures the speed of a device of this machine.

    Args:
      step_of: number of rows -> a step, to be timed.
      flops_of: number of rows -> its FLOPs.
      rows: of the run; as many are timed, unless a step gets too long.
      parameters: of the run's model over that of the step: an optimizer's time follows.
    """
    flops = flops_of(8) / 8  # of a row
    many = max(1, min(rows, int(MOST_FLOP / flops)))
    seconds, cores = _time(step_of(many))
    few = many // 4
    if not few:
        return Speed(many * flops / seconds, cores=cores)
    less, _ = _time(step_of(few))
    per_row = (seconds - less) / (many - few)
    update = seconds - many * per_row
    if per_row <= 0 or update < 0:  # the machine was busy with something else
        return Speed(many * flops / seconds, cores=cores)
    return Speed(flops / per_row, update * parameters, cores)


def _time(step: Callable[[], Any]) -> tuple[float, float]:
    """Returns the median seconds of a step, and the cores it keeps busy."""
    jax.block_until_ready(step())
    found: list[float] = []
    begin, used = time.perf_counter(), time.process_time()
    while len(found) < TIMED_STEPS or sum(found) < TIMED_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(step())
        found.append(time.perf_counter() - start)
    busy = (time.process_time() - used) / (time.perf_counter() - begin)
    return statistics.median(found), min(float(os.cpu_count() or 1), max(0.1, busy))
