"""The report of a BERT run: summary.json, its Markdown, a plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import here
from nebula_jax import printable
from nebula_jax.runtime.records import plots
from nebula_jax.runtime.records import report as run_report

FLOAT32 = 4  # bytes


def figures(
    found: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    *_: Any,
) -> dict[str, Any]:
    """Returns what a run's summary has of BERT; see `face.report.report`."""
    return {
        "bytes": crossed(_of_clusters(found)),
        "held_out": {name: held_out(each) for name, each in records.items()},
    }


def _of_clusters(found: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the clusters' summaries; of a run in one process, what they would be."""
    whole = found.get("whole")
    if not whole:
        return list(found.values())
    # Nothing has crossed: bytes are those of the payloads, without frame heads.
    count = whole["clusters"]
    rounds = whole["rounds"]
    sent = [
        (count - 1) * rounds.get("messages", 0),
        (count - 1) * rounds.get("message_bytes", 0),
    ]
    each = {
        **whole,
        "tokens": whole["tokens"] / count,
        "ledgers": {"": {"sent delta ": sent}},
    }
    return [each] * count


def crossed(clusters: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums the bytes of deltas that crossed, beside the formula and an all-reduce.

    A summary's `rounds` has a cluster's messages (see `cluster`). Returns {} if there
    were none; else `sent` and `formula` bytes of all clusters, `tokens` trained on,
    `per_token`, and `all_reduce_per_token`: 2 (R - 1) / R float32 gradients a cluster
    and step. `fewer`: how many times fewer bytes.
    """
    rounds = [each.get("rounds", {}) for each in clusters]
    if not rounds or not all(rounds):
        return {}
    sent = sum(
        size
        for each in clusters
        for ledger in each["ledgers"].values()
        for kind, (_, size) in ledger.items()
        if kind.startswith("sent delta ")
    )
    count = len(clusters)
    formula = (count - 1) * sum(each["message_bytes"] for each in rounds)
    tokens = sum(each["tokens"] for each in clusters)
    gradients = sum(
        (each["last_step"] - each["first_step"] + 1)
        * each["rounds"]["parameters"]
        * (2 * (count - 1) / count * FLOAT32)
        for each in clusters
    )
    return {
        "sent": sent,
        "formula": formula,
        "tokens": tokens,
        "per_token": sent / tokens if tokens else math.nan,
        "all_reduce_per_token": gradients / tokens if tokens else math.nan,
        "fewer": gradients / sent if sent else math.nan,
    }


def held_out(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists every evaluation: its step, and the loss by language in nats."""
    return [
        {
            "step": record["step"],
            "loss": record["held_out_mlm_loss"],
            "accuracy": record["held_out_mlm_accuracy"],
        }
        for record in records
        if "held_out_mlm_loss" in record
    ]


def mean(figures: Mapping[str, float | None]) -> float:
    """Averages a figure over the languages; NaN if one is null."""
    values = [math.nan if each is None else each for each in figures.values()]
    return sum(values) / len(values)


def curves(
    _: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[plots.Panel]:
    """Returns every cluster's training loss, and its held-out loss, against steps."""
    training = {
        name: [(each["step"], each["loss"]) for each in of_cluster if "loss" in each]
        for name, of_cluster in records.items()
    }
    evaluated = {
        name: [(each["step"], mean(each["loss"])) for each in held_out(of_cluster)]
        for name, of_cluster in records.items()
    }
    unit, title = "nats per masked token", "Held-out text, mean of the languages"
    return [
        plots.Panel("Training", unit, training),
        plots.Panel(title, unit, evaluated),
    ]


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders a run's summary."""
    sent = _bytes_markdown(summary["bytes"])
    return here.markdown(summary, sent, *_held_out_markdown(summary["held_out"]))


def _bytes_markdown(sizes: Mapping[str, float]) -> str:
    if not sizes:
        return ""
    return (
        f"Deltas sent: {printable.size(sizes['sent'])} (formula"
        f" {printable.size(sizes['formula'])}; the rest is frame heads),"
        f" {run_report.figure(sizes['per_token'], '.2f')} bytes a token. An all-reduce"
        " of float32 gradients at every step would have sent"
        f" {run_report.figure(sizes['all_reduce_per_token'], ',.0f')}:"
        f" {run_report.figure(sizes['fewer'], '.0f')} times as many."
    )


def _held_out_markdown(evaluations: Mapping[str, Any]) -> list[str]:
    """Renders the last evaluation of every cluster, with the first one in brackets."""
    rows = []
    for name, found in evaluations.items():
        if not found:
            continue
        first, last = found[0], found[-1]
        loss, before = (
            run_report.figure(mean(each["loss"]), ".3f") for each in (last, first)
        )
        accuracy = run_report.figure(mean(last["accuracy"]), ".1%")
        # Of a cluster that went on with another's run the first is not of step 0.
        steps = f"{last['step']} ({first['step']})"
        rows.append([name, steps, f"{loss} ({before})", accuracy])
    if not rows:
        return []
    return [
        "Held-out text, mean of the languages (in brackets: of the first evaluation):",
        run_report.table(["cluster", "step", "MLM loss", "accuracy"], rows),
    ]
