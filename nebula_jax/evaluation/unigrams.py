"""The frequencies of a text's pieces: what a language model has to be better than.

V vocabulary.
"""

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies


class Unigrams:
    """The counts of the pieces of a text that comes in batches."""

    def __init__(self, vocab_size: int) -> None:
        """Begins at nothing.

        Args:
          vocab_size: V.
        """
        self._counts = np.zeros(vocab_size, np.int64)

    def add(self, input_ids: np.ndarray) -> None:
        """Adds a batch, integers of any shape; padding and control pieces do not count.

        Args:
          input_ids: the batch.
        """
        text = input_ids[input_ids >= vocabularies.NUM_SPECIAL]
        self._counts += np.bincount(text, minlength=len(self._counts))

    def entropy(self) -> float | None:
        """Returns the loss of a model of frequencies alone, nats a token.

        With Miller and Madow's correction: counts of a part of a text make it look more
        regular than it is, by (pieces seen - 1) / (2 tokens). None before any text.
        """
        counts = self._counts[self._counts > 0]
        if not len(counts):
            return None
        total = counts.sum()
        shares = counts / total
        return float(-(shares @ np.log(shares)) + (len(counts) - 1) / (2 * total))
