"""The report of an M3 run: summary.json, its Markdown, a plot."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import here
from experiments.m3 import config
from nebula_jax.communication import codecs
from nebula_jax.runtime.records import plots
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import masking

FIGURES = (
    "rtd_auc",
    "fake_token_rate",
    "sampled_mlm_accuracy",
    "clm_accuracy",
    "unigram_accuracy",
)
PROBED = {
    "translation_gap": "cosine of translations, less that of others",
    "retrieval": "translations found as the nearest",
}
"""Figures of probes that are drawn, and their names there."""
STARVED = 1 / 3  # share of fakes in masked tokens below which RTD has little to find
GAP_KEPT = 0.9  # share of the start's translation gap below which the report warns
BETTER = 0.98  # share of the unigram entropy above which a generator is no better


def figures(
    found: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[dict[str, Any]]],
    summary: Mapping[str, Any],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Returns what a run's summary has of M3; see `face.report.report`."""
    of_discriminator = next(iter(records.values()))  # it is in the first cluster
    return {
        "bytes": _bytes(found, summary["flags"], summary["vocab_size"]),
        "held_out": held_out(of_discriminator),
        "probes": probes(of_discriminator),
        "generators": [
            {
                "name": name,
                "loss": losses[-1][1] if losses else None,
                "unigram_entropy": entropy,
            }
            for name, entropy, losses in of_generators(found, records)
        ],
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


def held_out(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists every evaluation of a discriminator: its step, language -> figures."""
    return [
        {
            "step": record["step"],
            "languages": {
                name: {
                    figure: record[f"held_out_{figure}"][name]
                    for figure in FIGURES
                    if f"held_out_{figure}" in record
                }
                for name in record["held_out_rtd_auc"]
            },
        }
        for record in records
        if "held_out_rtd_auc" in record
    ]


def probes(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists the probes of every evaluation: its step, and figures by name."""
    return [
        {
            name.removeprefix("probe_"): value
            for name, value in record.items()
            if name == "step" or name.startswith("probe_")
        }
        for record in records
        if any(name.startswith("probe_") for name in record)
    ]


def of_generators(
    found: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[dict[str, Any]]],
) -> list[tuple[str, float | None, list[tuple[int, float]]]]:
    """Returns name, unigram entropy and (step, MLM loss) of every generator.

    Args:
      found: cluster -> its summary.
      records: cluster -> its metrics; the first one has the discriminator, or with
        --cluster=whole all of them.
    """
    first = next(iter(records))
    entropies = found.get(first, {}).get("unigram_entropies", [])
    curves = []
    for k, entropy in enumerate(entropies):
        key = f"generator_{k}_loss"
        curve = [(each["step"], each[key]) for each in records[first] if key in each]
        curves.append((f"generator:{k}", entropy, curve))
    for name, of_cluster in list(records.items())[1:]:
        curve = [(each["step"], each["loss"]) for each in of_cluster if "loss" in each]
        curves.append((name, found.get(name, {}).get("unigram_entropy"), curve))
    return curves


def curves(
    found: Mapping[str, Mapping[str, Any]],
    of_all: Mapping[str, Sequence[dict[str, Any]]],
) -> list[plots.Panel]:
    """Returns losses of all clusters, RTD AUC by language and probes against steps."""
    name, records = next(iter(of_all.items()))
    trained = [record for record in records if "loss" in record]
    losses = {
        f"{name} CLM (eq. 10)": [(each["step"], each["clm_loss"]) for each in trained]
    }
    frequencies = {}
    for generator, entropy, curve in of_generators(found, of_all):
        losses[f"{generator} MLM (eq. 6)"] = curve
        if entropy is not None:
            frequencies[f"{generator} MLM (eq. 6)"] = entropy
    rtd = {"RTD": [(each["step"], each["rtd_loss"]) for each in trained]}
    auc: dict[str, list[tuple[int, float]]] = {}
    for each in held_out(records):
        for language, figures_of in each["languages"].items():
            auc.setdefault(language, []).append((each["step"], figures_of["rtd_auc"]))
    probed = {
        label: [
            (each["step"], mean(each[figure].values()))
            for each in probes(records)
            if figure in each
        ]
        for figure, label in PROBED.items()
    }
    return [
        plots.Panel(
            "Language models (dotted: frequencies alone)",
            "nats per masked token",
            losses,
            frequencies,
        ),
        plots.Panel("RTD loss (eq. 8)", "nats per token", rtd),
        plots.Panel(
            "RTD on held-out text (0.5: a guess; better fakes lower it)",
            "AUC",
            auc,
            {"": 0.5},
            has_mean=True,
        ),
        plots.Panel("Translations in the discriminator's encoder", "", probed),
    ]


def mean(values: Iterable[float | None]) -> float:
    """Returns the mean of some figures, at least one; NaN if one is null."""
    numbers = [math.nan if each is None else each for each in values]
    return sum(numbers) / len(numbers)


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders a run's summary."""
    slept = summary["flags"].get("emulate_compute")
    return here.markdown(
        summary,
        f"**{config.EMULATED.format(*slept)}.**" if slept else "",
        _sizes_markdown(summary["bytes"]),
        *(_held_out_markdown(summary["held_out"]) if summary["held_out"] else ()),
        *_probes_markdown(summary.get("probes", ())),
        *warnings(summary),
    )


def _probes_markdown(probes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renders the last probe, with the first one in brackets."""
    found = []
    with_pairs = [each for each in probes if "translation_gap" in each]
    if with_pairs:
        (gap, gap_before), (right, right_before) = (
            [
                run_report.figure(mean(each[name].values()), form)
                for each in (with_pairs[-1], with_pairs[0])
            ]
            for name, form in (("translation_gap", ".3f"), ("retrieval", ".0%"))
        )
        found.append(
            "In the discriminator's encoder the translation gap (cosine of translations"
            f" above that of others) is {gap} ({gap_before} before), and {right}"
            f" ({right_before}) are found as the nearest."
        )
    if probes and "rtd_encoder_gradient" in probes[-1]:
        last = probes[-1]
        norms = {
            name: run_report.figure(value, ".2g")
            for name, value in last.items()
            if name.endswith("_gradient")
        }
        parts = [
            f"{term.upper()} {norms[f'{term}_encoder_gradient']} in the encoder,"
            f" {norms[f'{term}_heads_gradient']} in the heads"
            for term in ("rtd", "clm")
        ]
        found.append(f"Norms of the gradients, weighted: {'; '.join(parts)}.")
    return found


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """Returns sentences about what a reader would not see in the curves."""
    found = []
    for each in summary.get("generators", ()):
        loss, entropy = each["loss"], each["unigram_entropy"]
        if loss is not None and entropy and loss >= BETTER * entropy:
            found.append(
                f"Warning: {each['name']} is no better than word frequencies: its loss"
                f" is {loss:.2f} nats, theirs {entropy:.2f}. Its samples are noise,"
                " which is easily detected and teaches little; train it longer, or"
                " begin with a masked language model."
            )
    with_pairs = [
        each for each in summary.get("probes", ()) if "translation_gap" in each
    ]
    gaps = [mean(each["translation_gap"].values()) for each in with_pairs]
    settings = summary.get("flags", {})
    begins_with = settings.get("hot_start") or settings.get("discriminator_start")
    if begins_with and len(gaps) > 1 and gaps[-1] < GAP_KEPT * gaps[0]:
        found.append(
            "Warning: translations lie less close together in the discriminator's"
            f" encoder (cosine above that of others: {gaps[0]:.3f} after step"
            f" {with_pairs[0]['step']}, {gaps[-1]:.3f} now). New heads may be spoiling"
            " it: --head_warmup_steps, --head_priors, --layer_decay and a lower"
            " --learning_rate protect it."
        )
    return found


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
            _clm(figures),
        ]
        for language, figures in last["languages"].items()
        for before in [first["languages"][language]]
    ]
    auc, right = (
        mean_of(last, figure) for figure in ("rtd_auc", "sampled_mlm_accuracy")
    )
    rows.append([f"mean of {len(rows)}", _auc(auc), "", "", ""])
    frequent = any("unigram_accuracy" in each for each in last["languages"].values())
    columns = ["language", "RTD AUC", "fake tokens", "sampled-MLM accuracy"]
    columns += [f"CLM accuracy{' (most frequent piece)' if frequent else ''}"]
    found = [
        f"Held-out text after step {last['step']} (in brackets: {first['step']}; an RTD"
        " AUC of 0.5 is a guess):",
        run_report.table(columns, rows),
        "Mean RTD AUC (after step): "
        + ", ".join(
            f"{_auc(mean_of(each, 'rtd_auc'))} ({each['step']})" for each in evaluations
        )
        + ".",
    ]
    if frequent and mean_of(last, "clm_accuracy") <= mean_of(last, "unigram_accuracy"):
        found.append(
            "CLM predicts masked tokens no better than always answering with the most"
            " frequent piece."
        )
    if right > 1 - STARVED:
        found.append(
            f"The generators sample {right:.0%} of the masked tokens right and leave"
            " the discriminator little to find. A higher --temperature or --mask_rate"
            " makes more fakes."
        )
    return found


def _clm(figures: Mapping[str, float]) -> str:
    found = f"{figures['clm_accuracy']:.1%}"
    frequent = figures.get("unigram_accuracy")
    return found if frequent is None else f"{found} ({frequent:.1%})"


def mean_of(evaluation: Mapping[str, Any], figure: str) -> float:
    """Averages a figure of one evaluation over the languages; NaN if one is null."""
    return mean(each[figure] for each in evaluation["languages"].values())


def _auc(value: float | None) -> str:
    """Formats an RTD AUC; null without a fake on held-out text."""
    return run_report.figure(value, ".3f")
