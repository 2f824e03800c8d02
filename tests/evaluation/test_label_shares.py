import numpy as np
import pytest

from nebula_jax.evaluation import label_shares

THIRDS = np.full(3, 1 / 3)


def softmax(logits):
    values = np.exp(logits)
    return values / values.sum(axis=1, keepdims=True)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(500, 3)) * 2


@pytest.mark.parametrize("shares", [THIRDS, np.array([0.7, 0.2, 0.1])])
def test_the_mean_has_the_shares(logits, shares):
    probabilities = softmax(logits + np.array([3.0, 0.0, -1.0])).astype(np.float32)
    constants = label_shares.offsets(probabilities, shares)
    means = label_shares.moved(probabilities, constants).mean(axis=0)
    np.testing.assert_allclose(means, shares, atol=2e-6)
    assert constants.mean() == pytest.approx(0)


def test_constants_that_were_added_are_found_again(logits):
    """Those that make the mean even are unique but for one that all labels share."""
    even = label_shares.offsets(softmax(logits), THIRDS)
    wrong = np.array([-2.0, 0.5, 1.5])
    found = label_shares.offsets(softmax(logits + even + wrong), THIRDS)
    np.testing.assert_allclose(found, -wrong, atol=1e-4)


def test_a_label_that_was_predicted_too_rarely_comes_back():
    random = np.random.default_rng(1)
    labels = np.repeat([0, 1, 2], 400)
    logits = random.normal(size=(1200, 3)) + 2 * np.eye(3)[labels]
    biased = softmax(logits - np.array([4.0, 0.0, 0.0]))
    before = np.mean(biased.argmax(1) == labels)
    constants = label_shares.offsets(biased[::2], THIRDS)  # labels are not read
    after = label_shares.moved(biased[1::2], constants).argmax(1)
    unbiased = np.mean(logits[1::2].argmax(1) == labels[1::2])
    assert before < unbiased - 0.15
    assert np.mean(after == labels[1::2]) > unbiased - 0.02


def test_a_probability_of_zero_or_one_is_no_error():
    probabilities = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.4]])
    constants = label_shares.offsets(probabilities, np.array([0.5, 0.5]))
    assert np.isfinite(label_shares.moved(probabilities, constants)).all()


@pytest.mark.parametrize(
    ("probabilities", "shares"),
    [(np.zeros((0, 3)), THIRDS), (np.full((2, 3), 1 / 3), np.array([0.5, 0.5, 0.0]))],
)
def test_what_has_no_answer_is_an_error(probabilities, shares):
    with pytest.raises(ValueError, match="no examples, or a label that never"):
        label_shares.offsets(probabilities, shares)
