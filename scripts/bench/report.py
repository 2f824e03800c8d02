"""The records of the benchmarks in Markdown."""

from collections.abc import Callable, Mapping
from typing import Any

from nebula_jax.runtime.records import report


def codecs(result: Mapping[str, Any]) -> str:
    """Renders the record of `bench_codecs`."""
    copy = result["copy_ms"]
    rows = [
        [
            f"`{row['codec']}`",
            f"{row['encode_ms']:.1f} ms",
            f"{row['encode_over_copy']:.2f}",
            f"{row['decode_ms']:.1f} ms",
            f"{row['ratio']:.4f}",
            f"{row['error_gaussian']:.5f}",
            f"{row['error_decaying']:.5f}",
        ]
        for row in result["codecs"]
    ]
    svd = [
        [
            row["matrices"],
            f"{row['full_ms']:.0f} ms",
            f"{row['ours_ms']:.0f} ms",
            f"{row['faster']:.1f}",
            f"{row['error_over_optimum_gaussian']:.5f}",
            f"{row['error_over_optimum_decaying']:.5f}",
        ]
        for row in result["svd"]
    ]
    targets = [
        [each["target"], f"{each['worst']:.3f}", report.VERDICTS[each["met"]]]
        for each in result["targets"]
    ]
    header = ["codec", "encode", "/ copy", "decode", "bytes", "error", "decaying"]
    svd_header = [
        *("svd(0.6) beside `jnp.linalg.svd`", "full", "ours", "faster"),
        *("error / optimum", "decaying"),
    ]
    return report.join(
        report.heading(result, f"seed {result['seed']}, {result['rounds']} rounds"),
        f"A {' x '.join(map(str, result['shape']))} float32 tensor; copying it takes"
        f" {copy['copy']:.1f} ms, `np.copyto` {copy['np.copyto']:.1f} ms. Error:"
        " relative, of Gaussian noise and of a matrix whose singular values decay.",
        report.table(header, rows),
        report.table(svd_header, svd),
        report.table(["target", "worst", "verdict"], targets, "lrl"),
    )


def bridge(result: Mapping[str, Any]) -> str:
    """Renders the record of `bench_bridge`, on loopback or on a shaped line."""
    before, after = result["load_before_and_after"]
    columns = _columns(result)
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
        _overlap(result["overlap"]) if "overlap" in result else "",
    )


def _columns(result: Mapping[str, Any]) -> dict[str, Callable[[Mapping], str]]:
    """Returns title -> the text of a cell, from a transport's figures."""

    def median(measures: Mapping, what: str, figure: str) -> float:
        return measures[what][figure]["median"]

    def speed(measures: Mapping, what: str, figure: str) -> str:
        spread = measures[what][figure]
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

    if "rate" in result:
        return {
            "25 MB, Mbit/s": lambda each: speed(each, "25 MB", "megabits_per_second"),
            "CPU s/GB": lambda each: cpu(each, "25 MB"),
        }
    return {
        "25 MB, GB/s": lambda each: speed(each, "25 MB", "gigabytes_per_second"),
        "3 MB, GB/s": lambda each: speed(each, "3 MB", "gigabytes_per_second"),
        "CPU s/GB, 25 MB": lambda each: cpu(each, "25 MB"),
        "CPU s/GB, 3 MB": lambda each: cpu(each, "3 MB"),
        "64 B µs, p50 / p99": trip,
        "on one core": lambda each: trip(each, "round trip, one core"),
    }


def _overlap(overlap: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            "{median:.1%} ({min:.1%} to {max:.1%})".format(**each["slowdown"]),
            "{median:.1%} (at most {max:.1%})".format(**each["noise"]),
            f"{each['sender_cpu_seconds']:.3f} + {each['receiver_cpu_seconds']:.3f}",
            f"{each['sender_share']:.1%}",
        ]
        for name, each in overlap.items()
    ]
    header = [
        *("computing while 25 MB leave", "slower", "noise without it"),
        *("CPU s, sender + receiver", "sender's share of all cores"),
    ]
    return report.table(header, rows)


def training(result: Mapping[str, Any]) -> str:
    """Renders the record of `bench_training`."""
    return report.join(
        report.heading(result, f"{result['rounds']} rounds"),
        *(_step(each) for each in result["measured"]),
        report.targets(result["targets"]),
    )


def _step(measured: Mapping[str, Any]) -> str:
    """Renders the figures of one kind of step."""
    shape = measured["shape"]
    steps = [
        [
            step["name"],
            f"{step['ms']:.0f} ms",
            f"{step['tokens_per_second']:,.0f}",
            *(
                report.NOTHING if over is None else f"{over:.2f}"
                for over in (step["over_pytorch"], step["over_same"])
            ),
        ]
        for step in measured["steps"]
    ]
    gains = [
        [gain["measure"], f"{gain['ms']:.0f} ms", f"{gain['times']:.2f}"]
        for gain in measured["gains"]
    ]
    profile = [  # in records of 24a1878c908d and before
        [row["part"], f"{row['ms']:.0f} ms", f"{row['share']:.0%}"]
        for row in measured.get("profile", ())
    ]
    header = ["step", "time", "tokens/s", "over PyTorch's float32", "over the same"]
    return report.join(
        f"**{measured['what']}**: {shape['layers']} layers of width {shape['width']},"
        f" {shape['vocab_size']:,} pieces, {shape['batch']} x {shape['length']}"
        " tokens.",
        report.table(header, steps),
        report.table(["bfloat16 step, Nebula-JAX", "without it", "slower"], gains),
        report.table(["part of that step", "time", "share"], profile)
        if profile
        else "",
    )


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
