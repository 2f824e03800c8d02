"""The end of an ABNet run: a table for a person, summary.json for programs, a plot."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

from experiments import run_report, shared_flags
from experiments.abnet import channels as abnet_channels
from experiments.abnet import config as abnet_config
from experiments.abnet import scaled_wan
from nebula_jax.communication import codec as codec_lib
from nebula_jax.training import metrics

EXAMPLES = 5  # translations that are printed


def report(names: Sequence[str], seconds: float) -> None:
    """Writes summary.json and plot unless nothing was left to do; prints the table.

    Args:
      names: the clusters of the run; the first one translates.
      seconds: wall time of this command.
    """
    folder = shared_flags.workdir()
    path = folder / "summary.json"
    theirs = [shared_flags.cluster_folder(name) / "summary.json" for name in names]
    newest = max((each.stat().st_mtime for each in theirs if each.is_file()), default=0)
    if not path.is_file() or path.stat().st_mtime < newest:
        plot(names[0], folder / "losses.png")
        summary = _gather(names, seconds)
        path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    show(json.loads(path.read_text()))
    print(f"all of it: {path}, {folder / 'losses.png'}")


def _gather(names: Sequence[str], seconds: float) -> dict[str, Any]:
    found = {name: run_report.read(shared_flags.cluster_folder(name)) for name in names}
    records = metrics.read(shared_flags.cluster_folder(names[0]))
    return {
        "command": shared_flags.command(),
        "commit": shared_flags.commit(),
        "hardware": run_report.hardware(),
        "seconds": round(seconds, 1),
        "flags": {
            name: flags.FLAGS[name].value
            for name in (
                *abnet_config.AGREED,
                *("source_model", "target_model", "data_dir", "pair_sources"),
                *("max_pairs", "wan", "ahead", "head_steps"),
            )
        },
        "clusters": [each for each in found.values() if each],
        "bytes": step_bytes(found.get("source", {})),
        "dilation": scaled_wan.read(shared_flags.workdir()),
        "losses": {
            name: run_report.first_and_last(
                metrics.read(shared_flags.cluster_folder(name))
            )
            for name in names
        },
        "bleu": [
            {"step": record["step"], **record["held_back_bleu"]}
            for record in records
            if "held_back_bleu" in record
        ],
        "examples": _examples(names[0], records),
    }


def step_bytes(source: dict[str, Any]) -> dict[str, float]:
    """Bytes a step that activations and gradients took, frame heads included.

    Args:
      source: the source cluster's summary; {} where there was no line.

    Returns:
      forward, backward: bytes a step; padded: of the same steps as padded float32 rows
      of --buckets' last length; and the two ratios. {} without a line.
    """
    if not source:
        return {}
    steps = source["last_step"] - source["first_step"] + 1
    buckets = abnet_config.buckets()
    sent = sum(_ledger(source, f"sent hidden[{length}]") for length in buckets)
    received = sum(
        _ledger(source, f"received gradient[{length}]") for length in buckets
    )
    width = source["width"]
    spec = abnet_channels.hidden_spec(abnet_config.buckets()[-1], width)
    padded = codec_lib.nbytes(spec["hidden"]) * abnet_config.MICRO_BATCHES.value
    return {
        "forward": sent / steps,
        "backward": received / steps,
        "padded": float(padded),
        "forward_ratio": sent / steps / padded,
        "backward_ratio": received / steps / padded,
    }


def _ledger(summary: dict[str, Any], kind: str) -> int:
    return summary["ledger"].get(kind, (0, 0))[1]


def _examples(name: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """The first translations of the newest test set."""
    steps = [record["step"] for record in records if "held_back_bleu" in record]
    if not steps:
        return []
    folder = shared_flags.cluster_folder("target") / "translations"
    path = folder / f"test-{steps[-1]:08d}.txt"
    return path.read_text("utf-8").splitlines()[:EXAMPLES] if path.is_file() else []


def plot(name: str, path: pathlib.Path) -> None:
    """Loss and BLEU against steps.

    Args:
      name: the cluster that has both.
      path: of the PNG to write.
    """
    # Here, so that clusters, which draw nothing, need not wait for it.
    import matplotlib.figure

    records = metrics.read(shared_flags.cluster_folder(name))
    figure = matplotlib.figure.Figure(figsize=(10, 4.2), layout="constrained")
    loss, score = figure.subplots(1, 2)
    steps = [record for record in records if "loss" in record]
    loss.plot([each["step"] for each in steps], [each["loss"] for each in steps])
    loss.set(xlabel="step", ylabel="nats per target token", title="Translation loss")
    judged = [record for record in records if "held_back_bleu" in record]
    for split in judged[-1]["held_back_bleu"] if judged else []:
        points = [
            (each["step"], each["held_back_bleu"][split])
            for each in judged
            if split in each["held_back_bleu"]
        ]
        score.plot(*zip(*points, strict=True), marker="o", label=split)
    score.set(xlabel="step", ylabel="BLEU", title="BLEU (case-insensitive)")
    if judged:
        score.legend(fontsize=8)
    for axes in (loss, score):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def show(summary: dict[str, Any]) -> None:
    """Prints the summary's tables."""
    console = rich.console.Console(highlight=False, width=100)
    console.print(run_report.clusters_table(summary))
    if summary["bytes"]:
        of = summary["bytes"]
        console.print(
            f"bytes a step: {metrics.in_bytes(of['forward'])} of hidden states"
            f" ({of['forward_ratio']:.3f} of padded float32),"
            f" {metrics.in_bytes(of['backward'])} of gradients"
            f" ({of['backward_ratio']:.3f})"
        )
    if summary["bleu"]:
        table = rich.table.Table(title="BLEU (case-insensitive, 13a)")
        splits = [split for split in summary["bleu"][-1] if split != "step"]
        for column in ("step", *splits):
            table.add_column(column, justify="right")
        for each in summary["bleu"]:
            cells = [f"{each[split]:.1f}" if split in each else "" for split in splits]
            table.add_row(str(each["step"]), *cells)
        console.print(table)
    for line in summary["examples"]:
        console.print(f"  {line}", markup=False)
