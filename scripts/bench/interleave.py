"""Timing in turn, round by round, with ratios within a round.

On a machine that does other work too, a time by itself means little.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def time_runs(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    pause: float = 0.0,
    warm: int = 0,
) -> dict[str, list[float]]:
    """Times every run in every round, after one round that does not count.

    Args:
      runs: name -> the timed function, which returns what it computes.
      rounds: the number that counts.
      pause: seconds before each run.
      warm: untimed calls right before the timed one, for functions that are slower
        after another one, as a JAX step is after one of PyTorch's.

    Returns:
      Name -> seconds, one for each round.
    """
    seconds = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(pause)
            for _ in range(warm):
                jax.block_until_ready(run())
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(over: list[float], under: list[float]) -> float:
    """Returns the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
