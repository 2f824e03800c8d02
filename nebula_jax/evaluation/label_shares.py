"""Label shares: predictions of a language moved until labels are as frequent as known.

A classifier that was trained in one language predicts some labels too rarely in others,
most of all where its encoder is weak. If labels are known to be as frequent there as in
its training, a constant for each label, added to the logarithms of its probabilities,
brings their mean over unlabeled examples to these shares. (Saerens et al. 2002 estimate
shares that have moved; here they are known, and what has moved is the classifier.)

N examples, C classes.
"""

import numpy as np

ROUNDS = 1000
NEAR = 1e-6
"""Largest difference of a mean from its share, at which the search ends."""
LEAST = 1e-12
"""In place of a probability of 0, which no constant moves."""


def offsets(probabilities: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Finds the constants that bring the mean probabilities to shares.

    Where probabilities are 0 or 1, it may get no nearer than they let it.

    Args:
      probabilities: [N, C] float, of unlabeled examples; a row adds up to 1.
      shares: [C] float, positive; they add up to 1.

    Returns:
      [C] float64, to add to log-probabilities; their mean is 0.

    Raises:
      ValueError: without an example, or if a share is 0.
    """
    if not len(probabilities) or np.min(shares) <= 0:
        raise ValueError("no examples, or a label that never occurs")
    found = np.zeros(len(shares))
    for _ in range(ROUNDS):
        means = moved(probabilities, found).mean(axis=0)
        if np.abs(means - shares).max() < NEAR:
            break
        found += np.log(shares / means)
    return found - found.mean()


def moved(probabilities: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """Adds constants to log-probabilities.

    Args:
      probabilities: [N, C] float.
      constants: [C] float, from `offsets`.

    Returns:
      [N, C] float64; a row adds up to 1.
    """
    logits = np.log(np.maximum(probabilities, LEAST)) + constants
    values = np.exp(logits - logits.max(axis=1, keepdims=True))
    return values / values.sum(axis=1, keepdims=True)
