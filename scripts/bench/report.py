"""The records of the benchmarks in Markdown."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nebula_jax.runtime.records import report


def table_of(records: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Renders a table.

    Args:
      columns: title -> its cells, as `str.format` makes them of a record.
    """
    rows = [[form.format(**each) for form in columns.values()] for each in records]
    return report.table(list(columns), rows)


CODECS = {
    "codec": "`{codec}`",
    "encode": "{encode_ms:.1f} ms",
    "/ copy": "{encode_over_copy:.2f}",
    "decode": "{decode_ms:.1f} ms",
    "bytes": "{ratio:.4f}",
    "error": "{error_gaussian:.5f}",
    "decaying": "{error_decaying:.5f}",
}


def codecs(result: Mapping[str, Any]) -> str:
    """Renders the record of `bench_codecs`."""
    copy = result["copy_ms"]
    return report.join(
        report.heading(result, f"seed {result['seed']}, {result['rounds']} rounds"),
        f"A {' x '.join(map(str, result['shape']))} float32 tensor; copying it takes"
        f" {copy['copy']:.1f} ms, `np.copyto` {copy['np.copyto']:.1f} ms. Error:"
        " relative, of Gaussian noise and of a matrix whose singular values decay.",
        table_of(result["codecs"], CODECS),
    )


def bridge(result: Mapping[str, Any]) -> str:
    """Renders the record of `bench_bridge`."""
    before, after = result["load_before_and_after"]
    columns = _columns()
    rows = [
        [name, *(cell(measures) for cell in columns.values())]
        for name, measures in result["transports"].items()
    ]
    return report.join(
        report.heading(
            result,
            f"{result['rounds']} rounds, load {before:.1f} before and {after:.1f}"
            " after",
        ),
        "Medians of the rounds; of throughput with the smallest and the largest.",
        report.table(["transport", *columns], rows),
        report.targets(result["targets"]),
    )


def _columns() -> dict[str, Callable[[Mapping], str]]:
    """Returns title -> the text of a cell, from a transport's figures."""

    def median(measures: Mapping, what: str, figure: str) -> float:
        return measures[what][figure]["median"]

    def speed(measures: Mapping, what: str) -> str:
        spread = measures[what]["gigabytes_per_second"]
        return "{median:.2f} ({min:.2f}-{max:.2f})".format(**spread)

    def cpu(measures: Mapping, what: str) -> str:
        parts = [
            median(measures, what, f"{end}cpu_seconds_per_gigabyte")
            for end in ("sender_", "receiver_", "")
        ]
        return "{:.2f}+{:.2f}={:.2f}".format(*parts)

    def trip(measures: Mapping, what: str = "round trip") -> str:
        parts = [median(measures, what, f"{p}_microseconds") for p in ("p50", "p99")]
        return "{:.0f} / {:.0f}".format(*parts)

    return {
        "25 MB, GB/s": lambda each: speed(each, "25 MB"),
        "3 MB, GB/s": lambda each: speed(each, "3 MB"),
        "CPU s/GB, 25 MB": lambda each: cpu(each, "25 MB"),
        "CPU s/GB, 3 MB": lambda each: cpu(each, "3 MB"),
        "64 B µs, p50 / p99": trip,
        "on one core": lambda each: trip(each, "round trip, one core"),
    }


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
