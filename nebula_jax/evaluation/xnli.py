"""Accuracy by language, their average, several seeds together; who only guesses.

N examples, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

AVERAGE = "average"

SURE = 3.0
"""Standard deviations above a guess at which a language counts as understood: of 15
languages that guess, one in 50 tables would have one beyond it."""


class Score(NamedTuple):
    """The score of a classifier on the examples of one language."""

    correct: int
    total: int
    labels: tuple[int, ...]
    """[C] how many examples have each label."""
    predicted: tuple[int, ...]
    """[C] how often each was predicted."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return self.correct / self.total

    @property
    def chance(self) -> float:
        """Accuracy of always predicting the most frequent label."""
        return max(self.labels) / self.total


def score(labels: np.ndarray, predictions: np.ndarray, classes: int) -> Score:
    """Compares predictions with labels, both [N] integers below C."""
    return Score(
        int(np.sum(labels == predictions)),
        len(labels),
        tuple(int(n) for n in np.bincount(labels, minlength=classes)),
        tuple(int(n) for n in np.bincount(predictions, minlength=classes)),
    )


def average(accuracies: Mapping[str, float]) -> float:
    """Mean of the languages' accuracies, each counting alike (Table 1's Avg)."""
    return float(np.mean(list(accuracies.values())))


def is_at_chance(of: Score) -> bool:
    """Returns True if it may as well be a guess, by the spread of N guesses."""
    spread = (of.chance * (1 - of.chance) / of.total) ** 0.5
    return of.accuracy <= of.chance + SURE * spread


def warnings(scores: Mapping[str, Score], names: Sequence[str]) -> list[str]:
    """Returns warnings about a table, in words.

    Args:
      scores: language -> score.
      names: of the classes.
    """
    found = []
    for language, of in scores.items():
        if is_at_chance(of):
            found.append(
                f"{language}: {of.accuracy:.1%} of {of.total} is no better than a guess"
                f" ({of.chance:.1%})"
            )
        never = [
            name
            for name, wanted, said in zip(names, of.labels, of.predicted, strict=True)
            if wanted and not said
        ]
        if never:
            found.append(f"{language}: {', '.join(never)} is never predicted")
    return found


class Spread(NamedTuple):
    """Mean over seeds, and their standard deviation (0 for a single one)."""

    mean: float
    deviation: float
    seeds: int


def over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Mean and sample standard deviation of every language, and of the average.

    Args:
      runs: language -> accuracy, a mapping for each seed.

    Returns:
      Language, then AVERAGE -> Spread. The deviation of the average is that of the
      seeds' averages, not a mean of the languages'.

    Raises:
      ValueError: if there is no run, or they have not the same languages.
    """
    if not runs or any(run.keys() != runs[0].keys() for run in runs):
        raise ValueError("runs of the same languages are needed, at least one")
    values = {language: [run[language] for run in runs] for language in runs[0]}
    values[AVERAGE] = [average(run) for run in runs]
    return {
        name: Spread(
            float(np.mean(each)),
            float(np.std(each, ddof=1)) if len(each) > 1 else 0.0,
            len(each),
        )
        for name, each in values.items()
    }
