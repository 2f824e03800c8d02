"""Quality on held-out pairs, for Tables 2 and 5: each row beside the first one.

Losses are compared seed by seed. For BLEU a sentence's translations of all seeds are
put together, and the sentences are drawn again and again (`bleu.paired_bootstrap`), so
that the interval is of other sentences, not of other seeds.
"""

import functools
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nebula_jax.evaluation import bleu, sentence_scores
from nebula_jax.runtime.records import report
from scripts.tables import sweep

Record = Mapping[str, Any]
BySeed = Mapping[str, sentence_scores.Scores]  # seed -> scores of a row's run


def by_seed(results: Mapping[str, Mapping[str, Any]]) -> BySeed:
    """Returns the scores of a row's runs (seed -> `abnet.figures`) that have any."""
    return {
        seed: sentence_scores.loads(result["held_out"])
        for seed, result in results.items()
        if result.get("held_out")
    }


def compare(row: BySeed, beside: BySeed) -> dict[str, Any]:
    """Returns what a record has of a row, compared with another, perhaps itself.

    As `held_out`: sentences; loss and bleu, seed -> figure. Of the seeds that both rows
    have also `difference` of the losses, seed -> figure, unless these are of other
    predictions; and `bleu_difference`, a `bleu.Apart`. {} without scores.
    """
    if not row:
        return {}
    found: dict[str, Any] = {
        "sentences": len(next(iter(row.values())).ids),
        "loss": {seed: sentence_scores.loss(each).mean for seed, each in row.items()},
        "bleu": {seed: bleu.of_statistics(each.counts) for seed, each in row.items()},
    }
    seeds = [seed for seed in row if seed in beside]
    pairs = [(beside[seed], row[seed]) for seed in seeds]
    names = {tuple(each.ids) for pair in pairs for each in pair}
    if row is beside or len(names) != 1:
        return {"held_out": found}
    if all(sentence_scores.are_paired(*pair) for pair in pairs):
        found["difference"] = {
            seed: found["loss"][seed] - sentence_scores.loss(beside[seed]).mean
            for seed in seeds
        }
    one, other = (
        functools.reduce(operator.add, [pair[side].counts for pair in pairs])
        for side in (0, 1)
    )
    found["bleu_difference"] = bleu.paired_bootstrap(one, other)._asdict()
    return {"held_out": found}


def bleus(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Returns each row's BLEU, in the order of the seeds that all of them have."""
    found = [row["held_out"]["bleu"] for row in rows]
    seeds = [seed for seed in found[0] if all(seed in each for each in found)]
    return [[each[seed] for seed in seeds] for each in found]


def with_error(by_seed: Mapping[str, float], form: str) -> str:
    """Renders a mean over seeds with its standard error; empty without a seed."""
    return sweep.spread(by_seed.values(), form, of_mean=True)


def interval(apart: Mapping[str, float]) -> str:
    """Renders a difference of BLEU with the interval that holds it."""
    return f"{apart['difference']:+.2f} ({apart['low']:+.2f} to {apart['high']:+.2f})"


def explanation(rows: Sequence[Mapping[str, Any]], beside: str) -> str:
    """Describes COLUMNS, of rows compared with that named `beside`; may be empty."""
    sizes = sorted(
        {each["held_out"]["sentences"] for each in rows if "held_out" in each}
    )
    if not sizes:
        return ""
    count = " and ".join(f"{size:,}" for size in sizes)
    return (
        f"On {count} pairs that no run trains on. Loss: teacher-forced, nats a"
        " predicted token, without dropout and label smoothing; mean and standard error"
        f" over seeds. Differences are from {beside}: of the loss paired by seed, with"
        " their standard error over seeds; of BLEU with the 95 % interval of a paired"
        f" bootstrap of {bleu.SAMPLES:,} samples, each sentence with its translations"
        " of all seeds."
    )


def _cell(render: Callable[[Record], str]) -> Callable[[Record], str]:
    """Returns what renders a figure of a row, which may have none."""

    def cell(row: Record) -> str:
        return render(row["held_out"]) if row.get("held_out") else report.NOTHING

    return cell


def _bleu_apart(found: Record) -> str:
    return interval(found["bleu_difference"]) if "bleu_difference" in found else ""


COLUMNS = (  # of quality, for rows with what `compare` returns
    sweep.Column("held-out loss", _cell(lambda each: with_error(each["loss"], ".3f"))),
    sweep.Column(
        "difference", _cell(lambda each: with_error(each.get("difference", {}), "+.3f"))
    ),
    sweep.Column(
        "BLEU", _cell(lambda each: f"{statistics.fmean(each['bleu'].values()):.2f}")
    ),
    sweep.Column("difference (95 %)", _cell(_bleu_apart)),
)
