"""Things run in turn, round by round, and compared within their round.

On a machine that does other things too, a time means little by itself.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def race(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    pause: float = 0.0,
    warm: int = 0,
) -> dict[str, list[float]]:
    """Seconds that each took in each round, after one round that does not count.

    Args:
      runs: name -> what is timed; what it returns is waited for.
      rounds: that count.
      pause: seconds before each.
      warm: runs before the one that is timed, in its turn, for those that are slower
        right after another one, as a step of ours is after one of PyTorch's.
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
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
