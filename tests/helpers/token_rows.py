"""Rows of random pieces, for models that mind where text ends."""

import numpy as np

from nebula_jax.data import tokenizers

# XLM-R's order, with [MASK] last: nothing may rely on control pieces coming first.
CONTROLS = tokenizers.SpecialTokens(1, 3, 0, 2, 59, size=60)
PAD, UNK, CLS, SEP, MASK = CONTROLS[:5]


def rows(lengths, width, seed=0):
    """Makes [CLS] ... [SEP] of these lengths, padded to a width."""
    random = np.random.RandomState(seed)
    ids = np.full((len(lengths), width), PAD, np.int32)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = [CLS, *random.randint(4, 59, length - 2), SEP]
    return ids
