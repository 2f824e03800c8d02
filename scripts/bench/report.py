"""Records of benchmarks in Markdown: a table, and that of the simulator."""

from collections.abc import Iterable, Mapping
from typing import Any

from nebula_jax.runtime.records import report


def table_of(records: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Renders a table, whose `columns` are title -> form of a cell for `str.format`."""
    rows = [[form.format(**each) for form in columns.values()] for each in records]
    return report.table(list(columns), rows)


def simulation(result: Mapping[str, Any]) -> str:
    """Renders the record of the simulator, which is among the tests."""
    per_minute = 60 * result["runs"] / result["cpu_seconds"]
    events = 60 * result["events"] / result["cpu_seconds"]
    rows = [
        [bug, report.NOTHING if seed is None else str(seed)]
        for bug, seed in result["bugs"].items()
    ]
    return report.join(
        report.heading(result, f"seeds from {result['first']} on"),
        f"{result['runs']:,} runs without a broken promise: {per_minute:,.0f} runs and"
        f" {events:,.0f} events a minute of one core.",
        report.table(["planted bug", "first seed that finds it"], rows),
    )
