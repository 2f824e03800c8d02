import numpy as np
import pytest

from nebula_jax.data import nli
from nebula_jax.evaluation import xnli


def score(correct, total, **fields):
    labels = np.arange(total) % 3
    predictions = np.where(np.arange(total) < correct, labels, (labels + 1) % 3)
    return xnli.score(labels, predictions, 3)._replace(**fields)


def test_a_score_counts():
    of = xnli.score(np.asarray([0, 1, 2, 2]), np.asarray([0, 2, 2, 2]), 3)
    assert of == xnli.Score(3, 4, (1, 1, 2), (1, 0, 3))
    assert of.accuracy == 0.75
    assert of.chance == 0.5


@pytest.mark.parametrize(
    ("correct", "is_guess"), [(1000, True), (1050, True), (1070, True), (1150, False)]
)
def test_a_guess_is_told_from_an_answer_by_its_spread(correct, is_guess):
    """3,000 guesses among three have a standard deviation of 26."""
    assert xnli.is_at_chance(score(correct, 3000)) == is_guess


def test_a_warning_names_language_and_figures():
    scores = {"en": score(2000, 3000), "sw": score(1010, 3000)}
    (warning,) = xnli.warnings(scores, nli.LABELS)
    assert warning == "sw: 33.7% of 3000 is no better than a guess (33.3%)"


def test_a_label_that_is_never_predicted_is_a_warning():
    scores = {"en": score(2000, 3000, predicted=(2000, 0, 1000))}
    assert xnli.warnings(scores, nli.LABELS) == ["en: neutral is never predicted"]


def test_the_average_is_of_languages():
    assert xnli.average({"en": 0.8, "sw": 0.5, "ur": 0.5}) == pytest.approx(0.6)
