"""Advice: the bottleneck of a plan, and the settings with which a step takes less.

Nothing is recommended that gains less than WORTH. All of it follows from
`planner.time_of`, with one thing changed at a time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from nebula_jax import errors
from nebula_jax.parallel import fan_out as fan_out_lib
from nebula_jax.parallel import planner
from nebula_jax.parallel.planner import M3, ABNet
from scripts.plans import abnet, count, settings

WORTH = 0.02
LADDER = (
    "identity",
    "bf16",
    "int8(tensor)",
    "pack_tokens|int8(tensor)",
    "pack_tokens|hadamard|int4(32)",
)
"""Codecs of both directions, the gentlest first."""
WINDOWS = (*range(17), 24, 32)


def savings(run: M3 | ABNet, cores: float | None = None) -> dict[str, float]:
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


def _faster(run: M3 | ABNet) -> dict[str, M3 | ABNet]:
    """Returns the run with one thing twice as fast, for each of them."""

    def lines(**halves: Any) -> Any:
        def changed(both: planner.Lines) -> planner.Lines:
            ways = {}
            for name, line in (("up", both.up), ("down", both.down)):
                rate = line.bytes_per_second * halves.get(name, 1)
                delay = line.delay_seconds / halves.get("delay", 1)
                ways[name] = planner.Line(rate, delay)
            return planner.Lines(**ways)

        if isinstance(run, M3):
            new = tuple(map(changed, run.lines))
            return dataclasses.replace(run, lines=new)
        return dataclasses.replace(run, line=changed(run.line))

    computing: dict[str, M3 | ABNet]
    if isinstance(run, M3):
        generators = tuple(each.scaled(0.5) for each in run.generators)
        computing = {
            "generators": dataclasses.replace(run, generators=generators),
            "discriminator": dataclasses.replace(
                run, discriminator=run.discriminator.scaled(0.5)
            ),
        }
    else:
        computing = {
            "source": dataclasses.replace(run, front=run.front.scaled(0.5)),
            "target": dataclasses.replace(run, back=run.back.scaled(0.5)),
        }
    return computing | {
        "line up": lines(up=2),
        "line down": lines(down=2),
        "round trips": lines(delay=2),
    }


def smallest(
    values: Any, seconds: Callable[[Any], float], enough: float = WORTH
) -> tuple[Any, float]:
    """Returns the first value that is nearly as good as the best, and its seconds.

    Args:
      values: in the order of preference.
      seconds: of a step with a value.
      enough: the share of the best time that may be lost.
    """
    times = {value: seconds(value) for value in values}
    best = min(times.values())
    return next(
        (value, each) for value, each in times.items() if each <= best * (1 + enough)
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
    late = late_by(run, settings.jitter(plan.wan))

    def with_window(window: int) -> float:
        return planner.time_of(dataclasses.replace(late, window=window), cores).seconds

    found = []
    window, after = smallest(WINDOWS, with_window)
    if text := gain(planner.time_of(late, cores).seconds, after):
        found.append(f"--window={window}: {text}, because more steps are under way.")
    elif window < run.window:
        found.append(f"--window={run.window} is enough; {window} would do as well.")
    else:
        found.append(f"--window={run.window} is enough, and no more than needed.")

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
    one_each = run.discriminator.micro_batch * replicas
    chosen = fan_out_lib.choose(generators, one_each, replicas)
    return chosen, one_each / max(generators)


def late_by(run: Any, jitter: float) -> Any:
    """Returns the run with every tensor late by the jitter of its line."""

    def later(both: planner.Lines) -> planner.Lines:
        ways = (both.up, both.down)
        return planner.Lines(
            *(
                planner.Line(way.bytes_per_second, way.delay_seconds + jitter)
                for way in ways
            )
        )

    if isinstance(run, M3):
        return dataclasses.replace(run, lines=tuple(map(later, run.lines)))
    return dataclasses.replace(run, line=later(run.line))


def of_abnet(plan: settings.Settings, run: ABNet, cores: float | None) -> list[str]:
    """Recommends --micro_batches, --max_in_flight and codecs; see `of_m3`."""
    late = late_by(run, settings.jitter(plan.wan))
    before = planner.time_of(late, cores).seconds
    counts = [
        number
        for number in range(1, 65)
        if not _refused(settings.check_rows, with_micro_batches(plan, number))
    ]
    divided = {number: divide(plan, late, number) for number in counts}
    best, after = smallest(
        counts, lambda number: planner.time_of(divided[number], cores).seconds
    )
    chosen = divided[best] if gain(before, after) else late

    def with_ahead(number: int) -> float:
        changed = dataclasses.replace(chosen, in_flight=number)
        return planner.time_of(changed, cores).seconds

    ahead, after = smallest(range(1, chosen.micro_batches + 1), with_ahead)
    if after > before:
        chosen, ahead, after = late, late.in_flight, before
    flags = f"--micro_batches={chosen.micro_batches} --max_in_flight={ahead}"
    if text := gain(before, after):
        text = f"{flags}: {text}, because more overlaps."
    else:
        text = f"{flags} is enough, at {after:.3g} s: more gains next to nothing."
    return [text, codec(plan, late, cores)]


def _refused(check: Callable[[Any], None], plan: settings.Settings) -> bool:
    try:
        check(plan)
    except errors.SettingsError:
        return True
    return False


def with_micro_batches(plan: settings.Settings, number: int) -> settings.Settings:
    """Returns the plan with another --micro_batches."""
    return dataclasses.replace(plan, run=plan.run.with_agreed(micro_batches=number))


def divide(plan: settings.Settings, run: ABNet, number: int) -> ABNet:
    """Returns a run with its batch in another number of micro-batches, all in flight.

    A micro-batch's compute is taken to be in proportion to its rows.
    """
    agreed = plan.run.agreed
    share = run.micro_batches / number
    texts = agreed.codec_texts
    forward, backward = abnet.bytes_each_way(plan, texts, number)

    def part(compute: planner.Compute) -> planner.Compute:
        less = compute.scaled(share)
        return dataclasses.replace(less, update=compute.update)

    return dataclasses.replace(
        run,
        front=part(run.front),
        back=part(run.back),
        forward_bytes=forward,
        backward_bytes=backward,
        micro_batches=number,
        in_flight=number,
    )


def codec(plan: settings.Settings, run: ABNet, cores: float | None) -> str:
    """Recommends the gentlest codecs with which the line is not the bottleneck."""
    agreed = plan.run.agreed
    now = planner.time_of(run, cores).seconds
    after = now
    for text in LADDER:
        ways = abnet.bytes_each_way(plan, (text, text), agreed.micro_batches)
        tried = dataclasses.replace(run, forward_bytes=ways[0], backward_bytes=ways[1])
        after = planner.time_of(tried, cores).seconds
        if not next(iter(savings(tried, cores))).startswith("line"):
            end = "the gentlest of the ladder with which the line is no bottleneck"
            break
    else:
        end = "the smallest of the ladder, and the line is the bottleneck still"
    if better := gain(now, after):
        return f"--forward_codec and --backward_codec={text}: {better}: {end}."
    return (
        f"The codecs given are fast enough; {text} is {end}, at {after:.3g} s a step."
    )


def memory(plan: settings.Settings, room: Any, part: count.Part) -> str:
    """Recommends the settings with which a step fits a device; empty if it does.

    Args:
      plan: its settings.
      room: of its experiment, `scripts.plans.m3` or `scripts.plans.abnet`.
      part: of one side, with its memory.
    """
    limit = 1e9 * plan.memory_gb
    if not limit or part.memory.total <= limit:
        return ""
    exceeds = (
        f"{part.name}: {part.memory.total / 1e9:.3g} GB exceed"
        f" --device_memory_gb={plan.memory_gb:g}"
    )
    estimate = room.memory_of(plan, part.name)
    now = estimate(plan)
    for flags, changed in _with_less_memory(plan, part.name):
        found = estimate(changed)
        # A compiled step's memory is taken to change as its estimate does.
        of_state = part.memory.state * found.state / now.state
        needed = of_state + part.memory.working * found.working / now.working
        if needed <= limit:
            return f"{exceeds}; {flags} needs about {needed / 1e9:.3g} GB."
    return (
        f"{exceeds} at any --micro_batches: try --remat, --fsdp, or a smaller"
        " --batch_size."
    )


def _with_less_memory(
    plan: settings.Settings, side: str
) -> Iterator[tuple[str, settings.Settings]]:
    """Yields flags and the plan with them: more micro-batches, then fewer under way."""
    agreed, last = plan.run.agreed, plan
    for number in range(agreed.micro_batches + 1, agreed.batch_size + 1):
        changed = with_micro_batches(plan, number)
        if not _refused(settings.check_rows, changed):
            last = changed
            yield f"--micro_batches={number}", changed
    if plan.experiment != "abnet" or side != "source":
        return
    number, most = last.run.agreed.micro_batches, last.run.local.max_in_flight
    for ahead in range(most - 1, 0, -1):
        fewer = last.run.with_local(max_in_flight=ahead)
        flags = f"--micro_batches={number} --max_in_flight={ahead}"
        yield flags, dataclasses.replace(last, run=fewer)


OF = {"m3": of_m3, "abnet": of_abnet}
