"""Shapes and batches of `bench_device`, for Nebula-JAX and PyTorch alike.

B batch, L length.
"""

from typing import NamedTuple

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer

RATE, MASK_RATE = 1e-4, 0.15


class Shape(NamedTuple):
    """A model and a batch."""

    what: str
    layers: int
    width: int
    heads: int
    feed_forward: int
    vocab_size: int
    batch: int
    length: int

    def config(self, dtype: str) -> transformer.Config:
        """Returns the encoder's configuration."""
        return transformer.Config(
            vocab_size=self.vocab_size,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            feed_forward=self.feed_forward,
            max_length=self.length,
            token_types=2,
            dtype=dtype,
        )

    def ids(self) -> np.ndarray:
        """Draws ids: [B, L] int32, no padding."""
        random, size = np.random.RandomState(0), (self.batch, self.length)
        ids = random.randint(vocabularies.NUM_SPECIAL, self.vocab_size, size)
        ids[:, 0], ids[:, -1] = vocabularies.SPECIAL.cls, vocabularies.SPECIAL.sep
        return ids.astype(np.int32)
