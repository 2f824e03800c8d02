"""Speed of a device: given, or measured here on gradients of the run's own model.

As many rows are timed as take a second. The optimizer is left out.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nebula_jax.parallel import planner
from scripts.plans import count

MOST_FLOP = 2e10  # of what is timed: at most a second on a slow laptop
TIMED_STEPS, TIMED_SECONDS = 5, 0.5


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of one device with one part of the model."""

    flops: float
    """FLOP/s, sustained, of matrix products, whatever else is computed with them."""
    cores: float = 1.0
    """Cores of the machine that a step keeps busy."""

    def compute(self, part: count.Part, devices: int) -> planner.Compute:
        """Returns the time of a part on devices that share its work evenly."""
        rate = self.flops * devices
        return planner.Compute(
            part.forward / rate, part.backward / rate, cores=self.cores * devices
        )


def measure(half: count.Half) -> Speed:
    """Measures the speed of a device of this machine."""
    flops = count.flops(half.gradient, *half.arguments(8)) / 8  # of a row
    rows = max(1, min(half.rows, int(MOST_FLOP / flops)))
    arguments = jax.tree.map(_filled, half.arguments(rows))
    gradient = jax.jit(half.gradient)
    seconds, cores = _time(lambda: gradient(*arguments))
    return Speed(rows * flops / seconds, cores)


def _filled(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0.02 * jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)


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
