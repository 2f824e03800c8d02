"""The figures of the benchmarks in Markdown, for experiments/README.md."""

from typing import Any

from scripts.bench.transports import tables


def codecs_block(result: dict[str, Any]) -> str:
    """What `scripts/bench_codecs.py` measured."""
    copy = result["copy_ms"]
    lines = [
        *_provenance(result, f"seed {result['seed']}"),
        f"A {' x '.join(map(str, result['shape']))} float32 tensor; copying it takes"
        f" {copy['copy']:.1f} ms. Error: relative, of Gaussian noise and of a matrix"
        " whose singular values decay.",
        "",
        "| codec | encode | / copy | decode | bytes | error | decaying |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| `{row['codec'].replace('|', chr(92) + '|')}` | {row['encode_ms']:.1f} ms"
        f" | {row['encode_over_copy']:.2f} | {row['decode_ms']:.1f} ms"
        f" | {row['ratio']:.4f} | {row['error_gaussian']:.5f}"
        f" | {row['error_decaying']:.5f} |"
        for row in result["codecs"]
    ]
    lines += [
        "",
        "| svd(0.6) beside `jnp.linalg.svd` | full | ours | faster"
        " | error / optimum | decaying |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['matrices']} | {row['full_ms']:.0f} ms | {row['ours_ms']:.0f} ms"
        f" | {row['faster']:.1f} | {row['error_over_optimum_gaussian']:.5f}"
        f" | {row['error_over_optimum_decaying']:.5f} |"
        for row in result["svd"]
    ]
    lines += ["", "| target | worst | |", "|---|---:|---|"]
    lines += [
        f"| {each['target']} | {each['worst']:.3f} | {_met(each['met'])} |"
        for each in result["targets"]
    ]
    return "\n".join(lines) + "\n"


def bridge_block(result: dict[str, Any]) -> str:
    """What `scripts/bench_bridge.py` measured, on loopback or on a shaped line."""
    before, after = result["load_before_and_after"]
    lines = _provenance(
        result,
        f"{result['rounds']} rounds, load {before:.1f} before and {after:.1f} after",
    )
    columns = tables.columns(result)
    lines += [
        "| transport | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    lines += [
        f"| {name} | " + " | ".join(cell(of) for cell in columns.values()) + " |"
        for name, of in result["transports"].items()
    ]
    lines += ["", "| target | measured | limit | |", "|---|---:|---:|---|"]
    for each in result["targets"]:
        limit = f"≥ {each['at_least']:g}" if "at_least" in each else None
        limit = limit or f"≤ {each['at_most']:g}"
        lines.append(
            f"| {each['what']} | {each['value']:.3f} | {limit} | {_met(each['met'])} |"
        )
    if "overlap" in result:
        lines += [
            "",
            "| computing while 25 MB leave | slower | noise without it"
            " | CPU s, sender + receiver | sender's share of all cores |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {name} | {of['slowdown']['median']:.1%} | {of['noise']['median']:.1%}"
            f" | {of['sender_cpu_seconds']:.3f} + {of['receiver_cpu_seconds']:.3f}"
            f" | {of['sender_share']:.1%} |"
            for name, of in result["overlap"].items()
        ]
    return "\n".join(lines) + "\n"


def training_block(result: dict[str, Any]) -> str:
    """What `scripts/bench_training.py` measured."""
    lines = _provenance(result, f"{result['rounds']} rounds")
    for each in result["measured"]:
        shape = each["shape"]
        lines += [
            f"**{each['what']}**: {shape['layers']} layers of width {shape['width']},"
            f" {shape['vocab_size']:,} pieces, {shape['batch']} x {shape['length']}"
            " tokens.",
            "",
            "| step | time | tokens/s | of PyTorch's in float32 | in the same |",
            "|---|---:|---:|---:|---:|",
        ]
        for step in each["steps"]:
            beside = [
                "–" if over is None else f"{over:.2f}"
                for over in (step["over_pytorch"], step["over_same"])
            ]
            lines.append(
                f"| {step['name']} | {step['ms']:.0f} ms"
                f" | {step['tokens_per_second']:,.0f} | {' | '.join(beside)} |"
            )
        lines += ["", "| what our bfloat16 step has | without it | slower |"]
        lines.append("|---|---:|---:|")
        lines += [
            f"| {gain['measure']} | {gain['ms']:.0f} ms | {gain['times']:.2f} |"
            for gain in each["gains"]
        ]
        lines += ["", "| of our bfloat16 step | time | share |", "|---|---:|---:|"]
        lines += [
            f"| {row['part']} | {row['ms']:.0f} ms | {row['share']:.0%} |"
            for row in each["profile"]
        ]
        lines.append("")
    if result["targets"]:
        lines += ["| target | measured | limit | |", "|---|---:|---:|---|"]
    lines += [
        f"| {each['what']} | {each['value']:.2f} | ≥ {each['at_least']:g}"
        f" | {_met(each['met'])} |"
        for each in result["targets"]
    ]
    return "\n".join(lines) + "\n"


def _provenance(result: dict[str, Any], more: str) -> list[str]:
    hardware = result["hardware"]
    return [
        f"    {result['command']}",
        "",
        f"Commit {result['commit']}, {more}, {hardware['cores']} cores of"
        f" {hardware['cpu']}, Python {hardware['python']}, jax {hardware['jax']};"
        f" {result['seconds'] / 60:.1f} minutes.",
        "",
    ]


def _met(met: bool | None) -> str:
    return {True: "met", False: "**not met**", None: "too noisy to tell"}[met]
