"""The report of an M3 run: summary.json, its Markdown, a plot."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.m3 import config
from nebula_jax.communication import codecs
from nebula_jax.runtime import report as run_report
from nebula_jax.runtime import restarts, traces
from nebula_jax.training import masking, metrics

STARVED = 1 / 3
"""Share of fakes among the masked tokens below which RTD has little to find."""
FIGURES = ("rtd_auc", "fake_token_rate", "sampled_mlm_accuracy", "clm_accuracy")


def report(
    folder: pathlib.Path,
    clusters: Mapping[str, pathlib.Path],
    settings: Mapping[str, Any],
    vocab_size: int,
    seconds: float,
) -> None:
    """Writes summary.json and plot unless they are up to date; prints the Markdown.

    Args:
      folder: of the run.
      clusters: name -> folder; the first one has the discriminator.
      settings: flag -> value, with batch_size, max_length and mask_rate.
      vocab_size: V.
      seconds: wall time of this command.
    """
    path = folder / "summary.json"
    if run_report.is_stale(path, clusters.values()):
        plot(clusters, folder / "losses.png")
        summary = _gather(folder, clusters, settings, vocab_size, seconds)
        run_report.write(path, summary)
    run_report.show(markdown(run_report.read_summary(folder)))
    print(f"report: {path}, {folder / 'losses.png'}")


def _gather(
    folder: pathlib.Path,
    clusters: Mapping[str, pathlib.Path],
    settings: Mapping[str, Any],
    vocab_size: int,
    seconds: float,
) -> dict[str, Any]:
    found = {name: run_report.read_summary(each) for name, each in clusters.items()}
    records = {name: metrics.read(each) for name, each in clusters.items()}
    return {
        **run_report.provenance(seconds),
        "vocab_size": vocab_size,
        "flags": dict(settings),
        "clusters": [each for each in found.values() if each],
        "restarts": restarts.read(folder, clusters.values()),
        "bytes": _bytes(found, settings, vocab_size),
        "losses": {
            name: run_report.first_and_last(each) for name, each in records.items()
        },
        "held_out": _held_out(next(iter(records.values()))),
    }


def _bytes(
    found: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    vocab_size: int,
) -> dict[str, float]:
    """Sums the bytes of the generators' training tensors, beside the formula's."""
    frames = sent = tokens = 0
    for name, each in found.items():
        if name.startswith("generator:") and each:
            count, size = each["ledger"].get("sent tokens", (0, 0))
            frames, sent, tokens = frames + count, sent + size, tokens + each["tokens"]
    length = settings["max_length"]
    positions = frames * settings["batch_size"] * length
    slots = masking.capacity(settings["mask_rate"], length)
    bits = codecs.bits_for(vocab_size)
    formula = (bits + 1 + bits * slots / length) / 8
    return {
        "frames": frames,
        "sent": sent,
        "per_position": sent / positions if positions else 0.0,
        "per_token": sent / tokens if tokens else 0.0,
        "formula_per_position": formula,
    }


def _held_out(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists every evaluation: its step, and language -> figures."""
    evaluations = []
    for record in records:
        if "held_out_rtd_auc" not in record:
            continue
        languages = record["held_out_rtd_auc"]
        evaluations.append(
            {
                "step": record["step"],
                "languages": {
                    name: {
                        figure: record[f"held_out_{figure}"][name] for figure in FIGURES
                    }
                    for name in languages
                },
            }
        )
    return evaluations


def plot(clusters: Mapping[str, pathlib.Path], path: pathlib.Path) -> None:
    """Draws losses of all clusters and RTD AUC by language against steps.

    Args:
      clusters: name -> folder; the first one has the discriminator.
      path: of the PNG to write.
    """
    # Imported here, so that clusters, which draw nothing, need not wait for it.
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(14, 4.2), layout="constrained")
    losses, rtd_loss, auc = figure.subplots(1, 3)
    discriminator = next(iter(clusters))
    for name, folder in clusters.items():
        records = [record for record in metrics.read(folder) if "loss" in record]
        steps = [record["step"] for record in records]
        if name == discriminator:
            values = [record["clm_loss"] for record in records]
            losses.plot(steps, values, label=f"{name} CLM (eq. 10)")
            rtd_loss.plot(steps, [record["rtd_loss"] for record in records])
        else:
            values = [record["loss"] for record in records]
            losses.plot(steps, values, label=f"{name} MLM (eq. 6)")
    losses.set(xlabel="step", ylabel="nats per masked token", title="Language models")
    losses.legend(fontsize=8)
    rtd_loss.set(xlabel="step", ylabel="nats per token", title="RTD loss (eq. 8)")

    evaluations = _held_out(metrics.read(clusters[discriminator]))
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
    auc.set(xlabel="step", ylabel="AUC", title="RTD on held-out text (0.5: a guess)")
    if languages:
        auc.legend(fontsize=7, ncols=3)
    for axes in (losses, rtd_loss, auc):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders a run's summary."""
    vocabulary = f", vocabulary of {summary['vocab_size']:,} pieces"
    seed = f"seed {summary['flags']['seed']}"
    return run_report.join(
        run_report.heading(summary, seed, vocabulary),
        _emulated(summary["flags"]),
        run_report.clusters(summary),
        restarts.markdown(summary),
        traces.markdown(summary["clusters"]),
        _sizes_markdown(summary["bytes"]),
        run_report.outages(summary["clusters"]),
        *(_held_out_markdown(summary["held_out"]) if summary["held_out"] else ()),
    )


def _emulated(settings: Mapping[str, Any]) -> str:
    given = settings.get("emulate_compute")
    return f"**{config.EMULATED.format(*given)}.**" if given else ""


def _sizes_markdown(sizes: Mapping[str, float]) -> str:
    if not sizes["frames"]:
        return ""
    return (
        f"Sent per position {sizes['per_position']:.3f} bytes (formula"
        f" {sizes['formula_per_position']:.3f}; the rest is frame heads), per token"
        f" that is not padding {sizes['per_token']:.3f}."
    )


def _held_out_markdown(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renders the last evaluation, with the first one in brackets."""
    first, last = evaluations[0], evaluations[-1]
    rows = [
        [
            language,
            f"{_auc(figures['rtd_auc'])} ({_auc(before['rtd_auc'])})",
            f"{figures['fake_token_rate']:.1%} ({before['fake_token_rate']:.1%})",
            f"{figures['sampled_mlm_accuracy']:.1%}",
            f"{figures['clm_accuracy']:.1%}",
        ]
        for language, figures in last["languages"].items()
        for before in [first["languages"][language]]
    ]
    auc, right = (mean(last, figure) for figure in ("rtd_auc", "sampled_mlm_accuracy"))
    rows.append([f"mean of {len(rows)}", _auc(auc), "", "", ""])
    columns = ("RTD AUC", "fake tokens", "sampled-MLM accuracy", "CLM accuracy")
    found = [
        f"Held-out text after step {last['step']} (in brackets: {first['step']}; an RTD"
        " AUC of 0.5 is a guess):",
        run_report.table(["language", *columns], rows),
        "Mean RTD AUC (after step): "
        + ", ".join(
            f"{_auc(mean(each, 'rtd_auc'))} ({each['step']})" for each in evaluations
        )
        + ".",
    ]
    if right > 1 - STARVED:
        found.append(
            f"The generators sample {right:.0%} of the masked tokens right and leave"
            " the discriminator little to find. A higher --temperature or --mask_rate"
            " makes more fakes."
        )
    return found


def mean(evaluation: Mapping[str, Any], figure: str) -> float:
    """Averages a figure of one evaluation over the languages; NaN if one is null."""
    values = [each[figure] for each in evaluation["languages"].values()]
    return math.nan if None in values else sum(values) / len(values)


def _auc(value: float | None) -> str:
    """Formats an RTD AUC; null without a fake on held-out text."""
    return run_report.figure(value, ".3f")
