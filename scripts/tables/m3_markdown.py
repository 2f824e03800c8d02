"""What blocks of several kinds share: command, provenance, a row a cluster, targets.

And the one small block that has no file of its own, of `fake_rates`.
"""

from collections.abc import Mapping
from typing import Any


def head(summary: Mapping[str, Any], more: str = "") -> list[str]:
    """Lines of Markdown.

    Args:
      summary: a run's summary.json.
      more: put behind its time.
    """
    lines = [
        f"    {summary['command']}",
        "",
        f"Commit {summary['commit']}, seed {summary['flags']['seed']},"
        f" {machine(summary)}; {summary['seconds'] / 60:.1f} minutes{more}.",
        "",
        "| cluster | steps | loss | tokens/s | sent | received | waited |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in summary["clusters"]:
        losses = summary["losses"][each["cluster"]]
        curve = f"{losses['first']:.3f} → {losses['last']:.3f}"
        if not losses["first"] and not losses["last"]:
            curve = "–"  # it has no loss of its own
        lines.append(
            f"| {each['cluster']} | {each['last_step']} | {curve}"
            f" | {each['tokens_per_second']:,.0f}"
            f" | {each['bytes_sent'] / 1e6:.2f} MB"
            f" | {each['bytes_received'] / 1e6:.2f} MB"
            f" | {each['waited_seconds'] / each['seconds']:.0%} |"
        )
    return lines


def table_head(result: Mapping[str, Any]) -> list[str]:
    """What the block of a table of many runs begins with: command, provenance."""
    seeds = result["seeds"]
    return [
        f"    {result['command']}",
        "",
        f"{of_commits(result['commit'])},"
        f" seed{'s' * (len(seeds) > 1)} {', '.join(seeds)},"
        f" {machine(result)}; {result['seconds'] / 60:.0f} minutes of runs.",
        "",
    ]


def of_commits(names: str) -> str:
    """`Commit a`, or `Commits a, b` of what went on, or was done, by more than one."""
    return f"Commit{'s' * (', ' in names)} {names}"


def targets(result: Mapping[str, Any]) -> list[str]:
    """What was to be reached at most, and what was; no lines if there was nothing."""
    lines = []
    if result["targets"]:
        lines += ["", "| target | measured | limit | |", "|---|---:|---:|---|"]
    return lines + [
        f"| {each['what']} | {each['value']:.3f} | ≤ {each['at_most']:.3f}"
        f" | {'met' if each['met'] else '**not met**'} |"
        for each in result["targets"]
    ]


def machine(result: Mapping[str, Any]) -> str:
    """Where a result was measured, in words."""
    hardware = result["hardware"]
    return (
        f"{hardware['cores']} cores of {hardware['cpu']}, Python {hardware['python']},"
        f" jax {hardware['jax']}"
    )


def fakes_block(result: Mapping[str, Any]) -> str:
    """What `scripts/fake_rates.py` measured, in Markdown."""
    lines = [
        *table_head(result),
        "| temperature | mask rate | steps | minutes | fake tokens, first → last"
        " | masked tokens sampled right | RTD AUC |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        fakes, right, auc = (
            " → ".join(form.format(value) for value in row[figure])
            for figure, form in (
                ("fake_token_rate", "{:.1%}"),
                ("sampled_mlm_accuracy", "{:.1%}"),
                ("rtd_auc", "{:.3f}"),
            )
        )
        lines.append(
            f"| {row['temperature']:g} | {row['mask_rate']:g} | {row['steps']}"
            f" | {row['seconds'] / 60:.0f} | {fakes} | {right} | {auc} |"
        )
    return "\n".join(lines) + "\n"
