"""The benchmark's figures as tables on a terminal."""

from collections.abc import Callable
from typing import Any

import rich.console
import rich.table


def show(result: dict[str, Any]) -> None:
    """Prints the figures as tables."""
    console = rich.console.Console(highlight=False, width=100)
    table = rich.table.Table(title="Medians (min-max of throughput)")
    table.add_column("transport")
    for title in columns(result):
        table.add_column(title, justify="right")
    for name, measures in result["transports"].items():
        table.add_row(name, *(cell(measures) for cell in columns(result).values()))
    console.print(table)
    table = rich.table.Table(title="Targets (medians of the rounds' ratios)")
    for title in ("what", "value", "target", ""):
        table.add_column(title, justify="left" if title == "what" else "right")
    for each in result["targets"]:
        limit = f">= {each['at_least']:g}" if "at_least" in each else None
        limit = limit or f"<= {each['at_most']:g}"
        met = {True: "met", False: "NOT MET", None: "too noisy"}[each["met"]]
        table.add_row(each["what"], f"{each['value']:.3f}", limit, met)
    if result["targets"]:
        console.print(table)
    if "overlap" in result:
        console.print(_overlap_table(result["overlap"]))


def _overlap_table(overlap: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(title="A jitted computation while 25 MB leave")
    titles = (
        "transport",
        "slower",
        "noise without it",
        "CPU s, sender + receiver",
        "sender's share of all cores",
    )
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    for name, of in overlap.items():
        table.add_row(
            name,
            "{median:.1%} ({min:.1%}-{max:.1%})".format(**of["slowdown"]),
            "{median:.1%} (max {max:.1%})".format(**of["noise"]),
            f"{of['sender_cpu_seconds']:.3f}+{of['receiver_cpu_seconds']:.3f}",
            f"{of['sender_share']:.1%}",
        )
    return table


def columns(result: dict[str, Any]) -> dict[str, Callable[[dict], str]]:
    """Title -> the text of a cell, from a transport's figures."""

    def median(measures: dict, what: str, figure: str) -> float:
        return measures[what][figure]["median"]

    def speed(measures: dict, what: str, figure: str) -> str:
        of = measures[what][figure]
        return f"{of['median']:.2f} ({of['min']:.2f}-{of['max']:.2f})"

    def cpu(measures: dict, what: str) -> str:
        parts = [
            median(measures, what, f"{end}cpu_seconds_per_gigabyte")
            for end in ("sender_", "receiver_", "")
        ]
        return "{:.2f}+{:.2f}={:.2f}".format(*parts)

    def trip(measures: dict, what: str = "round trip") -> str:
        parts = [median(measures, what, f"{p}_microseconds") for p in ("p50", "p99")]
        return "{:.0f} / {:.0f}".format(*parts)

    if "rate" in result:
        return {
            "25 MB, Mbit/s": lambda of: speed(of, "25 MB", "megabits_per_second"),
            "CPU s/GB": lambda of: cpu(of, "25 MB"),
        }
    return {
        "25 MB, GB/s": lambda of: speed(of, "25 MB", "gigabytes_per_second"),
        "3 MB, GB/s": lambda of: speed(of, "3 MB", "gigabytes_per_second"),
        "CPU s/GB, 25 MB": lambda of: cpu(of, "25 MB"),
        "CPU s/GB, 3 MB": lambda of: cpu(of, "3 MB"),
        "64 B us, p50 / p99": trip,
        "on one core": lambda of: trip(of, "round trip, one core"),
    }
