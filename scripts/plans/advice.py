"""Advice: the bottleneck of a plan, and the settings with which a step takes less.

Nothing is recommended that gains less than WORTH. All of it follows from
`planner.time_of`, with one thing changed at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from nebula_jax.parallel import planner
from nebula_jax.parallel.planner import M3
from scripts.plans import settings

WORTH = 0.02
WINDOWS = (*range(17), 24, 32)


def savings(run: M3, cores: float | None = None) -> dict[str, float]:
    """Computes what a step would gain if one thing were twice as fast.

    Args:
      run, cores: as for `time_of`.

    Returns:
      Name -> the share of a step's time saved, the largest first: that is the
      bottleneck. Those that compute, the two directions of the line, and `round trips`,
      the delay of both.
    """
    now = planner.time_of(run, cores).seconds
    found = {
        name: 1 - planner.time_of(faster, cores).seconds / now if now else 0.0
        for name, faster in _faster(run).items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _faster(run: M3) -> dict[str, M3]:
    """Returns the run with one thing twice as fast, for each of them."""
    generators = tuple(each.scaled(0.5) for each in run.generators)
    discriminator = run.discriminator.scaled(0.5)
    return {
        "generators": dataclasses.replace(run, generators=generators),
        "discriminator": dataclasses.replace(run, discriminator=discriminator),
        "line up": _with_lines(run, up=2),
        "line down": _with_lines(run, down=2),
        "round trips": _with_lines(run, delay=0.5),
    }


def _with_lines(run: M3, up: int = 1, down: int = 1, delay: float = 1) -> M3:
    """Returns the run with other lines.

    Args:
      run: as it is.
      up, down: factors of the rates.
      delay: factor of the delay.
    """

    def changed(line: planner.Line, factor: int) -> planner.Line:
        return planner.Line(factor * line.bytes_per_second, delay * line.delay_seconds)

    def both(lines: planner.Lines) -> planner.Lines:
        return planner.Lines(changed(lines.up, up), changed(lines.down, down))

    return dataclasses.replace(run, lines=tuple(map(both, run.lines)))


def smallest(values: Any, seconds: Callable[[Any], float]) -> tuple[Any, float]:
    """Returns the first value that is nearly as good as the best, and its seconds.

    Args:
      values: in the order of preference.
      seconds: of a step with a value.
    """
    times = {value: seconds(value) for value in values}
    best = min(times.values())
    return next(
        (value, each) for value, each in times.items() if each <= best * (1 + WORTH)
    )


def gain(before: float, after: float) -> str:
    """Returns `a step takes 12 % less` if that is worth it, else nothing."""
    if after > before * (1 - WORTH):
        return ""
    return f"a step takes {1 - after / before:.0%} less, {after:.3g} s"


def of_m3(plan: settings.Settings, run: M3, cores: float | None) -> list[str]:
    """Recommends --fan_out and --window.

    Args:
      plan: its settings.
      run: as it is now.
      cores: see `planner.time_of`.
    """
    before = planner.time_of(run, cores).seconds

    def with_window(window: int) -> float:
        return planner.time_of(dataclasses.replace(run, window=window), cores).seconds

    found = []
    window, after = smallest(WINDOWS, with_window)
    if text := gain(before, after):
        found.append(f"--window={window}: {text}, because more steps are in flight.")
    else:
        found.append(f"--window={run.window} is enough; needed is {window}.")

    number = plan.run.local
    replicas = plan.devices[1] // number.model_parallel
    wanted, ratio = fan_out(run, replicas)
    more = planner.time_of(dataclasses.replace(run, fan_out=wanted), cores).seconds
    text = (
        f"while one of the discriminator's {replicas} replicas trains on a micro-batch"
        f" of each generator, a generator makes {ratio:.3g}"
    )
    per = more / wanted * run.fan_out
    if gain(before, per):
        found.append(
            f"--fan_out={wanted}: {text}; {before / per - 1:.0%} more tokens/s, in"
            f" batches {wanted / run.fan_out:.3g} times as large."
        )
    else:
        found.append(
            f"--fan_out={run.fan_out} is enough: {text} (t_d / t_g, section 3.3:"
            f" n = {wanted}), but a larger batch would not make tokens faster."
        )
    return found


def fan_out(run: M3, replicas: int) -> tuple[int, float]:
    """Returns n of section 3.3, and t_d / t_g.

    Args:
      run: its pace.
      replicas: of the discriminator, of which each trains on one micro-batch in t_d.
    """
    generators = [each.micro_batch for each in run.generators]
    # As many as the slowest generator makes while the discriminator takes a step.
    one_each = run.discriminator.micro_batch * replicas
    ratio = one_each / max(generators)
    return max(1, min(replicas, round(ratio))), ratio
