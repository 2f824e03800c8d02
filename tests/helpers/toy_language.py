"""Vocabulary and random scores of toy language models, for the searches' tests."""

import numpy as np

from nebula_jax.data import tokenizers

SPECIAL = tokenizers.SpecialTokens(0, 1, 2, 3, 4, size=8)
PAD, UNK, CLS, SEP, MASK = SPECIAL[:5]
PIECES = (5, 6, 7)
TABLE = np.random.RandomState(0).randn(97, 8).astype(np.float32) * 1.5


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def text(row):
    """y_1 ... y_n [SEP] of a padded row."""
    end = list(row).index(SEP)
    assert row[0] == CLS
    assert (row[end + 1 :] == PAD).all()
    return tuple(int(token) for token in row[1 : end + 1])
