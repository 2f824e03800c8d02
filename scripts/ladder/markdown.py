"""The record of `bert_ladder` in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts.plans import bert as plan
from scripts.plans import text


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record; it may lack some of its tables."""
    return report.join(
        report.heading(result, f"seed {result['seed']}"),
        _ladder(result["ladder"], result["hardware"]) if "ladder" in result else "",
        _scaling(result["scaling"], result["hardware"]) if "scaling" in result else "",
        plan.markdown(result["cost"]) if "cost" in result else "",
    )


def _ladder(ladder: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    model, rungs = ladder["model"], ladder["rungs"]
    height, length = ladder["batch"]
    is_cpu = ladder["platform"] == "cpu"
    where = f"{hardware['cores']} cores" if is_cpu else hardware["devices"]
    return report.join(
        f"**The ladder**: {model['size']}, {model['layers']} layers of width"
        f" {model['width']}, {model['vocab_size']:,} pieces,"
        f" {text.number(model['parameters'])} parameters; {height} x {length} tokens of"
        f" {ladder['text']}, {ladder['rounds']} rounds, on {where}. The first"
        f" rung has `{flags(ladder['start'])}`; each other one is a flag more."
        " Tokens that are padding do not count. Ratios are of tokens/s, medians of the"
        " rounds' ratios.",
        _rates([*rungs, *ladder["beside"]]),
        _attention(ladder),
        _parity(rungs),
        "Losses are of the first"
        f" {len(rungs[0]['losses'])} steps, each on a batch of its own; the difference"
        " is the largest from the rung that a rung stands on. All-reduces are counted"
        " in the compiled program: those of gradients in a step, and the bytes that"
        " are added up, metrics included.",
        _devices(rungs, is_cpu),
    )


def _devices(rungs: Sequence[Mapping[str, Any]], is_cpu: bool) -> str:
    """Renders what the number of devices means for the last rungs."""
    if rungs[-1]["devices"] == 1:
        return (
            "There is one device, so nothing is added up over devices, and two rungs"
            " are missing: one all-reduce a batch, and the same overlapped."
        )
    if is_cpu:
        return (
            "The devices of the last rungs are simulated: they share the cores that one"
            " device has alone, and so can gain nothing here. Their all-reduces are"
            " what differs."
        )
    return ""


def flags(values: Mapping[str, Any]) -> str:
    """Returns flags as they are given.

    >>> flags({"dtype": "bfloat16", "micro_batches": 2})
    '--dtype=bfloat16 --micro_batches=2'
    """
    return " ".join(f"--{name}={value}" for name, value in values.items())


def _rates(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["name"],
            f"`{flags(row['flags'])}`" if row.get("flags") else "",
            f"{row['ms']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['least']:,.0f}-{row['most']:,.0f}",
            report.figure(row.get("over_below"), ".2f"),
            report.figure(row["over_first"], ".2f"),
            report.figure(row["over_pytorch"], ".2f"),
        ]
        for row in rows
    ]
    header = [
        *("step", "flags", "ms", "tokens/s", "least-most"),
        *("over the one below", "over the first", "over PyTorch's"),
    ]
    return report.table(header, cells, "llrrrrrr")


def _parity(rungs: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["name"],
            str(row["devices"]),
            f"{row['padding']:.0%}",
            f"{row['losses'][0]:.4f} → {row['losses'][-1]:.4f}",
            report.figure(row["difference"], ".1e"),
            str(row["all_reduce_times"]),
            metrics.in_bytes(row["all_reduce_bytes"])
            if row["all_reduce_bytes"]
            else report.NOTHING,
        ]
        for row in rungs
    ]
    header = [
        *("step", "devices", "padding", "loss", "difference"),
        *("all-reduces", "added up"),
    ]
    return report.table(header, cells)


def _attention(ladder: Mapping[str, Any]) -> str:
    """Renders which attention goes on, and how the text is laid out."""
    goes_on = ladder["attention"]
    decided = (
        "Fused attention was clearly faster in a trial before, so it goes on."
        if goes_on == "fused"
        else "Fused attention was not clearly faster in a trial before, so the rungs"
        " after it go on without it."
    )
    return (
        f"{decided} The text is packed, whole sentences in a row while they fit, and"
        f" {ladder['packed_padding']:.0%} of it is padding. For the ladder every row is"
        " cut off at a length drawn evenly, so that about half is padding, as it can be"
        " in text of documents (Krell et al. 2021, arXiv 2107.02027). `packed text` is"
        " the text as `pretrain_bert` reads it, with the step that joined rows stand"
        " on: joining would gain nothing there."
    )


def _scaling(scaling: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    model, rows = scaling["model"], scaling["rows"]
    height, length = scaling["batch"]
    slept = 1000 * scaling["emulated_seconds"]
    return report.join(
        f"**Scaling**: a cluster of {', '.join(str(row['processes']) for row in rows)}"
        f" processes over loopback, real runs of `pretrain_bert`: {model['size']},"
        f" {text.number(model['parameters'])} parameters, {scaling['steps']} steps of"
        f" {height} x {length} tokens in all, {scaling['micro_batches']} micro-batches"
        " and one all-reduce.",
        _equality(rows),
        "Parameters after the last step, and losses of all steps, beside those of one"
        " process. Bytes are what a process sends in a step: 2 (N - 1) / N times the"
        " float32 parameters; the same of what the compiled program adds up; and what"
        " the kernel counted on loopback, protocols and all other traffic included.",
        _times(rows),
        f"**A sleep stands in for compute** (--emulate_compute): {slept:.0f} ms of each"
        " step, in every process, as if it had a batch of its own. So t(1) / t(N) is"
        " the efficiency of weak scaling, and the share that is not t(1) is exposed:"
        " the exchange, and the wait for a core, since all processes share"
        f" {hardware['cores']}. Another sleep gives another efficiency: of a larger"
        " model the gradients are larger too.",
    )


def _equality(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            str(row["processes"]),
            f"{row['difference']:.1e}",
            f"{row['equal']:.1%}",
            f"{row['loss_difference']:.1e}",
            *(
                report.NOTHING if not row[name] else metrics.in_bytes(row[name])
                for name in ("bytes_formula", "bytes_program", "bytes_loopback")
            ),
        ]
        for row in rows
    ]
    header = [
        *("processes", "a parameter differs by at most", "equal bit for bit"),
        *("a loss differs by at most", "bytes a step, formula", "program", "kernel"),
    ]
    return report.table(header, cells, "r" * len(header))


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            str(row["processes"]),
            f"{1000 * row['step_seconds']:.0f}",
            f"{1000 * row['not_slept']:.0f}",
            f"{row['efficiency']:.3f}",
            f"{row['exposed']:.1%}",
        ]
        for row in rows
    ]
    header = ["processes", "ms a step", "of these not slept", "t(1) / t(N)", "exposed"]
    return report.table(header, cells, "r" * len(header))
