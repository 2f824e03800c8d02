"""The report of an ABNet run: summary.json, its Markdown, a plot."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import here
from experiments.abnet import config
from nebula_jax import printable
from nebula_jax.data import split_parallel
from nebula_jax.evaluation import bleu
from nebula_jax.runtime.records import plots, run_folder
from nebula_jax.runtime.records import report as run_report

SPLIT = split_parallel.HELD_OUT
EXAMPLES = 5  # translations that are printed
FLOAT32 = 4  # bytes


def figures(
    found: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    summary: Mapping[str, Any],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Returns what a run's summary has of ABNet; see `face.report.report`."""
    of_target = next(iter(records.values()))  # the first cluster has the target model
    scored = [each for each in of_target if "held_out_bleu" in each]
    translations = run_folder.of_cluster(folder, "target") / "translations"
    return {
        "bytes": step_bytes(found.get("source"), summary["flags"]),
        "bleu": [{"step": each["step"], **each["held_out_bleu"]} for each in scored],
        "ceiling": [
            each["held_out_ceiling"] for each in of_target if "held_out_ceiling" in each
        ][-1:],
        "held_out": held_out(of_target),
        "examples": _examples(translations, scored),
    }


def step_bytes(
    source: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Averages the bytes of a step's activations and gradients, with frame heads.

    `source` is the source cluster's summary, None or {} where there was no line: then
    the result is {}. Else it has `forward` and `backward`, bytes a step; `padded`,
    those of float32 rows padded to the longest bucket; and the two ratios.
    """
    if not source:
        return {}
    steps, buckets = (
        source["last_step"] - source["first_step"] + 1,
        settings["length_buckets"],
    )
    padded = float(FLOAT32 * settings["batch_size"] * buckets[-1] * source["width"])

    def of(kind: str) -> float:
        kinds = [f"{kind}[{length}]" for length in buckets]
        return sum(source["ledger"].get(each, (0, 0))[1] for each in kinds) / steps

    forward, backward = of("sent hidden"), of("received gradient")
    return {
        "forward": forward,
        "backward": backward,
        "padded": padded,
        "forward_ratio": forward / padded,
        "backward_ratio": backward / padded,
    }


def held_out(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the figures of held-out pairs after the last step; {} without such pairs.

    They are step, loss (nats a token), standard_error, tokens, sentences and bleu.
    """
    found: dict[str, float] = {}
    for record in records:
        if SPLIT in record.get("held_out_loss", {}):
            wanted = ("loss", "standard_error", "tokens", "sentences", "bleu")
            figures = {each: record[f"held_out_{each}"][SPLIT] for each in wanted}
            found = {"step": record["step"], **figures}
    return found


def _examples(folder: pathlib.Path, scored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Reads the first translations of the newest test set, given all evaluations."""
    newest = max((each["step"] for each in scored), default=0)
    path = folder / f"test-{newest:08d}.txt"
    return path.read_text("utf-8").splitlines()[:EXAMPLES] if path.is_file() else []


def curves(
    _: Mapping[str, Mapping[str, Any]],
    of_all: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[plots.Panel]:
    """Returns loss and BLEU of the first cluster against steps."""
    records = next(iter(of_all.values()))
    losses = [(each["step"], each["loss"]) for each in records if "loss" in each]
    scores: dict[str, list[tuple[int, float]]] = {}
    for each in records:
        for split, score in each.get("held_out_bleu", {}).items():
            scores.setdefault(split, []).append((each["step"], score))
    unit = "nats per target token"
    return [
        plots.Panel("Translation loss", unit, {"training": losses}),
        plots.Panel("BLEU (case-insensitive)", "BLEU", scores),
    ]


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders a run's summary."""
    examples = summary.get("examples", ())  # a published record has none
    return here.markdown(
        summary,
        _sizes_markdown(summary["bytes"]),
        _bleu_markdown(summary["bleu"], summary["flags"]["pair"]),
        _ceiling_markdown(summary.get("ceiling", ())),
        _held_out_markdown(summary.get("held_out", {})),
        "\n".join(f"    {line}" for line in examples),
    )


def _sizes_markdown(sizes: Mapping[str, float]) -> str:
    if not sizes:
        return ""
    return (
        f"Bytes a step: {printable.size(sizes['forward'])} of hidden states"
        f" ({sizes['forward_ratio']:.3f} of padded float32),"
        f" {printable.size(sizes['backward'])} of gradients"
        f" ({sizes['backward_ratio']:.3f})."
    )


def _held_out_markdown(found: Mapping[str, float]) -> str:
    if not found:
        return ""
    return (
        f"{found['sentences']:,.0f} held-out pairs after step {found['step']}:"
        f" loss {found['loss']:.3f} ± {found['standard_error']:.3f} nats a predicted"
        f" token, BLEU {found['bleu']:.2f}."
    )


def _bleu_markdown(scores: Sequence[Mapping[str, float]], pair: str) -> str:
    if not scores:
        return ""
    words = bleu.tokenizer_of(config.languages(pair)[1])
    splits = [split for split in scores[-1] if split != "step"]
    rows = [
        [str(each["step"])]
        + [f"{each[split]:.1f}" if split in each else "" for split in splits]
        for each in scores
    ]
    header = [f"BLEU (case-insensitive, {words}) after step", *splits]
    return run_report.table(header, rows, "r" * len(header))


def _ceiling_markdown(found: Sequence[Mapping[str, float]]) -> str:
    """Says what the references score, if the target's pieces do not keep all."""
    if not found or min(found[0].values()) > 99.95:
        return ""
    scores = ", ".join(f"{name} {score:.1f}" for name, score in found[0].items())
    return (
        "BLEU of the references themselves, in the target model's pieces, which lose"
        f" letters, accents or spaces: {scores}. No translation can be expected to have"
        " more."
    )
