import numpy as np
import pytest

from nebula_jax.evaluation import unigrams


def test_the_entropy_of_counts_by_hand():
    found = unigrams.Unigrams(10)
    assert found.entropy() is None
    found.add(np.array([[2, 5, 6, 3], [2, 5, 5, 0]]))
    found.add(np.array([6, 7, 7]))
    # 5 three times, 6 and 7 twice each; 2, 3 and 0 are no text.
    expected = -(3 / 7 * np.log(3 / 7) + 2 * 2 / 7 * np.log(2 / 7)) + 2 / 14
    assert found.entropy() == pytest.approx(expected)


def test_the_correction_makes_a_part_agree_with_the_whole():
    shares = np.arange(1, 501) / np.arange(1, 501).sum()
    truth = -np.sum(shares * np.log(shares))
    random = np.random.default_rng(0)
    found = unigrams.Unigrams(505)
    found.add(random.choice(np.arange(5, 505), size=5000, p=shares))
    assert found.entropy() == pytest.approx(truth, abs=0.02)
