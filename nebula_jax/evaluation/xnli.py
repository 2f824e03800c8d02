"""Accuracy by language, their average, and its difference from chance.

N examples, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

AVERAGE = "average"

SURE = 3.0
"""Standard deviations above chance from which an accuracy is no guess: of tables of 15
languages at chance, one in 50 has an accuracy beyond it."""


class Score(NamedTuple):
    """The result of a classifier on the examples of one language."""

    correct: int
    total: int
    labels: tuple[int, ...]  # [C] number of examples with each label
    predicted: tuple[int, ...]  # [C] number of predictions of each label

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.correct / self.total

    @property
    def chance(self) -> float:
        """The accuracy of always predicting the most frequent label."""
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
    """Returns the unweighted mean of the languages' accuracies (Table 1's Avg)."""
    return float(np.mean(list(accuracies.values())))


def is_at_chance(score: Score) -> bool:
    """Returns True if N guesses could reach the accuracy, within SURE deviations."""
    spread = (score.chance * (1 - score.chance) / score.total) ** 0.5
    return score.accuracy <= score.chance + SURE * spread


def warnings(scores: Mapping[str, Score], names: Sequence[str]) -> list[str]:
    """Lists what makes a table by language doubtful; `names` are of the C classes."""
    found = []
    for language, of in scores.items():
        if is_at_chance(of):
            found.append(
                f"{language}: {of.accuracy:.1%} of {of.total} is no better than a guess"
                f" ({of.chance:.1%})"
            )
        counts = zip(names, of.labels, of.predicted, strict=True)
        never = [name for name, labels, predicted in counts if labels > 0 == predicted]
        if never:
            found.append(f"{language}: {', '.join(never)} is never predicted")
    return found
