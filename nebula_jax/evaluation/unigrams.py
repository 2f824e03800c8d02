"""The frequencies of a text's pieces: what a language model has to be better than.

V vocabulary.
"""

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies

ENOUGH = 4
"""Tokens for each piece seen from which the entropy is right to two tenths of a nat: of
text whose frequencies follow Zipf's law, with up to 40,000 pieces."""


class Unigrams:
    """The counts of the pieces of a text that comes in batches."""

    def __init__(self, vocab_size: int) -> None:
        """Begins at nothing."""
        self._counts = np.zeros(vocab_size, np.int64)

    def add(self, input_ids: np.ndarray) -> None:
        """Adds a batch of any shape; padding and control pieces do not count."""
        text = input_ids[input_ids >= vocabularies.NUM_SPECIAL]
        self._counts += np.bincount(text, minlength=len(self._counts))

    def entropy(self) -> float | None:
        """Returns the loss of a model of frequencies alone, nats a token.

        With Miller and Madow's correction: counts of a part of a text make it look more
        regular than it is, by (pieces seen - 1) / (2 tokens). None of a text with fewer
        than ENOUGH tokens for each piece, such as what is left of a run that goes on.
        """
        counts = self._counts[self._counts > 0]
        total = counts.sum()
        if not total or total < ENOUGH * len(counts):
            return None
        shares = counts / total
        return float(-(shares @ np.log(shares)) + (len(counts) - 1) / (2 * total))
