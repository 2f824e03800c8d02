"""The text of a plan, a pure function of its numbers."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100  # characters of a line
BALANCED = 0.05  # what twice the speed of one part saves, if others are as busy
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Formats a count with three digits.

    >>> number(278292882), number(42)
    ('278 M', '42')
    """
    rounded = float(f"{value:.3g}")  # first: 999,999 is a million
    for size, unit in UNITS:
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [
                cell.rjust(width)
                for cell, width in zip(row[1:], widths[1:], strict=True)
            ]
        ).rstrip()
        for row in rows
    ]


def plan(result: Mapping[str, Any]) -> str:
    """Renders a plan; `result` is what `scripts.plan.plan` returns."""
    step = result["step"]
    lines = [*result["heading"], "", *columns(_parts(result)), ""]
    lines += [*columns(_lines(result)), ""]
    lines.append(
        f"A step takes {step['seconds']:.3g} s: {step['per_second']:.3g} steps/s,"
        f" {number(step['tokens_per_second'])} tokens/s. {step['steps']:,} steps take"
        f" {step['hours']:.3g} h, {number(step['device_hours'])} device-hours."
    )
    name, share = next(iter(result["savings"].items()))
    if share < BALANCED:
        lines.append(
            f"No part alone is the bottleneck: with the {name} twice as fast, a step"
            f" would take {share:.0%} less, because others are as busy."
        )
    else:
        lines.append(
            f"The bottleneck: {name}. Twice as fast, a step would take"
            f" {share:.0%} less."
        )
    idle = "; ".join(
        f"{each['name']} {1 - each['busy'] / step['seconds']:.0%}"
        for each in result["busy"]
    )
    lines += [f"Idle in a step: {idle}.", "", "Recommended:"]
    for each in result["advice"]:
        lines += textwrap.wrap(
            each, WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    for each in ["", *result["assumptions"]]:
        lines += textwrap.wrap(each, WIDTH) or [""]
    return "\n".join(lines)


def _parts(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    titles = ["cluster", "devices", "trained", "FLOP forward", "backward"]
    rows = [(*titles, "s forward", "backward", "memory a device, estimated")]
    counts = ("trained", "forward_flop", "backward_flop")
    for each in result["parts"]:
        rows.append(
            (
                each["name"],
                str(each["devices"]),
                *(number(each[key]) for key in counts),
                *(f"{each[key]:.3g}" for key in ("forward_s", "backward_s")),
                f"{each['memory_bytes'] / 1e9:.3g} GB",
            )
        )
    return rows


def _lines(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = [("line", "MB a step", "s at its rate", "MB/s")]
    for each in result["lines"]:
        seconds = "no limit" if each["seconds"] is None else f"{each['seconds']:.3g}"
        sent, rate = (f"{each[key] / 1e6:.3g}" for key in ("bytes", "bytes_per_second"))
        rows.append((each["name"], sent, seconds, rate))
    return rows
