import numpy as np
import pytest

from nebula_jax.training import losses

RANDOM = np.random.RandomState(0)


def test_masked_cross_entropy_is_minus_log_probability_over_filled_slots():
    """Eq. 6, and eq. 10 with the minus sign and logarithm it is printed without."""
    logits = RANDOM.randn(2, 3, 7).astype(np.float32)
    labels = RANDOM.randint(0, 7, (2, 3))
    weights = np.asarray([[1, 1, 0], [1, 0, 0]], np.float32)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = 0.0
    for row, slot in ((0, 0), (0, 1), (1, 0)):
        want -= np.log(p[row, slot, labels[row, slot]])
    total = losses.masked_cross_entropy(logits, labels, weights)
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_replaced_token_detection_is_eq_8():
    logits = RANDOM.randn(2, 4).astype(np.float32)
    is_original = np.asarray([[1, 0, 1, 1], [0, 1, 1, 0]], bool)
    weights = np.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
    d = 1 / (1 + np.exp(-logits))  # D(x^corrupt, i), that the token is original
    terms = np.where(is_original, np.log(d), np.log(1 - d))
    total = losses.replaced_token_detection(logits, is_original, weights)
    np.testing.assert_allclose(total, -(terms * weights).sum(), rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_spreads_a_share_over_the_vocabulary(smoothing):
    """Against the definition, with log-probabilities laid out."""
    logits = RANDOM.randn(5, 7).astype(np.float32)
    labels = RANDOM.randint(0, 7, 5)
    weights = np.asarray([1, 0, 1, 1, 0], np.float32)
    log_p = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    spread = np.full((5, 7), smoothing / 7)
    spread[np.arange(5), labels] += 1 - smoothing
    want = -(spread * log_p).sum(-1) @ weights
    total = losses.label_smoothed_cross_entropy(logits, labels, weights, smoothing)
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_the_mean_of_nothing_is_zero():
    assert losses.mean(np.float32(0), np.float32(0)) == 0
