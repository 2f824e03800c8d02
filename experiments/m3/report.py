"""The end of an M3 run: a table for a person, summary.json for programs, a plot."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

from experiments import run_report, shared_flags
from experiments.m3 import config as m3_config
from nebula_jax.communication import codecs
from nebula_jax.training import masking, metrics

STARVED = 1 / 3
"""Of the masked tokens, the share of fakes below which RTD has little to find."""
FIGURES = ("rtd_auc", "fake_token_rate", "sampled_mlm_accuracy", "clm_accuracy")


def report(names: Sequence[str], seconds: float, vocab_size: int) -> None:
    """Writes summary.json and plot unless nothing was left to do; prints the table.

    Args:
      names: the clusters of the run; the first one judges.
      seconds: wall time of this command.
      vocab_size: V.
    """
    folder = shared_flags.workdir()
    path = folder / "summary.json"
    theirs = [shared_flags.cluster_folder(name) / "summary.json" for name in names]
    newest = max((each.stat().st_mtime for each in theirs if each.is_file()), default=0)
    if not path.is_file() or path.stat().st_mtime < newest:
        plot(names, folder / "losses.png")
        summary = _gather(names, seconds, vocab_size)
        path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    show(json.loads(path.read_text()))
    print(f"all of it: {path}, {folder / 'losses.png'}")


def _gather(names: Sequence[str], seconds: float, vocab_size: int) -> dict[str, Any]:
    found = {name: run_report.read(shared_flags.cluster_folder(name)) for name in names}
    judge = names[0]
    return {
        "command": shared_flags.command(),
        "commit": shared_flags.commit(),
        "hardware": run_report.hardware(),
        "seconds": round(seconds, 1),
        "vocab_size": vocab_size,
        "flags": {
            name: flags.FLAGS[name].value
            for name in (
                *(*m3_config.AGREED, *m3_config.AGREED_IF_SET, "hot_start"),
                *("data_dir", "wan", "devices_per_cluster"),
            )
        },
        "clusters": [each for each in found.values() if each],
        "bytes": _bytes(found, vocab_size),
        "losses": {
            name: run_report.first_and_last(
                metrics.read(shared_flags.cluster_folder(name))
            )
            for name in names
        },
        "held_back": _held_back(metrics.read(shared_flags.cluster_folder(judge))),
    }


def _bytes(found: dict[str, dict], vocab_size: int) -> dict[str, float]:
    """Bytes that the generators' training tensors took, beside the formula's."""
    frames = sent = steps = tokens = 0
    for name, each in found.items():
        if name.startswith("generator:") and each:
            count, size = each["ledger"].get("sent Tensor[0]", (0, 0))
            frames, sent, tokens = frames + count, sent + size, tokens + each["tokens"]
            steps += each["last_step"] - each["first_step"] + 1
    positions = steps * shared_flags.BATCH_SIZE.value * m3_config.MAX_LENGTH.value
    slots = masking.capacity(m3_config.MASK_RATE.value, m3_config.MAX_LENGTH.value)
    bits = codecs.bits_for(vocab_size)
    formula = (bits + 1 + bits * slots / m3_config.MAX_LENGTH.value) / 8
    return {
        "frames": frames,
        "sent": sent,
        "per_position": sent / positions if positions else 0.0,
        "per_token": sent / tokens if tokens else 0.0,
        "formula_per_position": formula,
    }


def _held_back(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every evaluation: its step, and language -> figures."""
    evaluations = []
    for record in records:
        if "held_back_rtd_auc" not in record:
            continue
        languages = record["held_back_rtd_auc"]
        evaluations.append(
            {
                "step": record["step"],
                "languages": {
                    name: {
                        figure: record[f"held_back_{figure}"][name]
                        for figure in FIGURES
                    }
                    for name in languages
                },
            }
        )
    return evaluations


def plot(names: Sequence[str], path: pathlib.Path) -> None:
    """Losses of all clusters, and RTD AUC by language, against steps.

    Args:
      names: the clusters of the run; the first one judges.
      path: of the PNG to write.
    """
    # Here, so that clusters, which draw nothing, need not wait for it.
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(14, 4.2), layout="constrained")
    losses, rtd_loss, auc = figure.subplots(1, 3)
    for name in names:
        records = metrics.read(shared_flags.cluster_folder(name))
        records = [record for record in records if "loss" in record]
        steps = [record["step"] for record in records]
        if name == names[0]:
            values = [record["clm_loss"] for record in records]
            losses.plot(steps, values, label=f"{name} CLM (eq. 10)")
            rtd_loss.plot(steps, [record["rtd_loss"] for record in records])
        else:
            values = [record["loss"] for record in records]
            losses.plot(steps, values, label=f"{name} MLM (eq. 6)")
    losses.set(xlabel="step", ylabel="nats per masked token", title="Language models")
    losses.legend(fontsize=8)
    rtd_loss.set(xlabel="step", ylabel="nats per token", title="RTD loss (eq. 8)")

    evaluations = _held_back(metrics.read(shared_flags.cluster_folder(names[0])))
    colors = matplotlib.colormaps["tab20"].colors
    languages = list(evaluations[-1]["languages"]) if evaluations else []
    for index, language in enumerate(languages):
        auc.plot(
            [each["step"] for each in evaluations],
            [each["languages"][language]["rtd_auc"] for each in evaluations],
            label=language,
            color=colors[index % len(colors)],
        )
    auc.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    auc.set(xlabel="step", ylabel="AUC", title="RTD on held-back text (0.5: a guess)")
    if languages:
        auc.legend(fontsize=7, ncols=3)
    for axes in (losses, rtd_loss, auc):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def show(summary: dict[str, Any]) -> None:
    """Prints the summary's tables."""
    console = rich.console.Console(highlight=False, width=100)
    console.print(run_report.clusters_table(summary))
    if summary["bytes"]["frames"]:
        sizes = summary["bytes"]
        console.print(
            f"sent per position: {sizes['per_position']:.3f} bytes (formula"
            f" {sizes['formula_per_position']:.3f}; the rest is frame heads), per real"
            f" token {sizes['per_token']:.3f}"
        )
    if not summary["held_back"]:
        return
    first, last = summary["held_back"][0], summary["held_back"][-1]
    table = rich.table.Table(
        title=f"Held-back text after step {last['step']} (RTD AUC: 0.5 is a guess;"
        " fakes: share of tokens)"
    )
    table.add_column("language")
    columns = ("AUC", "fakes")
    for column in [f"{each} at step {first['step']}" for each in columns] + [*columns]:
        table.add_column(column, justify="right")
    table.add_column("sampled MLM", justify="right")
    table.add_column("CLM", justify="right")
    for language, figures in last["languages"].items():
        table.add_row(
            language,
            f"{first['languages'][language]['rtd_auc']:.3f}",
            f"{first['languages'][language]['fake_token_rate']:.1%}",
            f"{figures['rtd_auc']:.3f}",
            f"{figures['fake_token_rate']:.1%}",
            f"{figures['sampled_mlm_accuracy']:.1%}",
            f"{figures['clm_accuracy']:.1%}",
        )
    console.print(table)
    right = [each["sampled_mlm_accuracy"] for each in last["languages"].values()]
    if sum(right) > (1 - STARVED) * len(right):
        console.print(
            f"The generators sample {sum(right) / len(right):.0%} of the masked tokens"
            " right and leave the discriminator little to find. A higher --temperature"
            " or --mask_rate makes more fakes."
        )
