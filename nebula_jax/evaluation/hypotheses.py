"""Hypotheses of a translation, and the best of them by length-normalized score.

B sentences, N hypotheses of a sentence, K of them chosen, Q longest target row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LENGTH_PENALTY = 1.1  # exponent of GNMT's penalty; ABNet's code
LOWEST = -1e9  # below every log-probability of a hypothesis; finite, so it adds


class Translations(NamedTuple):
    """The best hypothesis of every sentence.

    ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
    scores: [B] float32, log-probability over length penalty.
    """

    ids: jax.Array
    scores: jax.Array


def length_penalty(length: jax.Array | int) -> jax.Array | float:
    """Returns ((5 + length) / 6)^LENGTH_PENALTY, which divides a log-probability."""
    return ((5.0 + length) / 6.0) ** LENGTH_PENALTY


def gather_rows(values: jax.Array, index: jax.Array) -> jax.Array:
    """Reorders hypotheses: values [B, N, ...] at index [B, K] -> [B, K, ...]."""
    return jax.vmap(lambda rows, at: rows[at])(values, index)


def best(ids: jax.Array, scores: jax.Array) -> Translations:
    """Selects the hypothesis with the highest score.

    Args:
      ids: [B, N, Q] int32.
      scores: [B, N] float32.
    """
    index = jnp.argmax(scores, axis=-1)[:, None]
    return Translations(gather_rows(ids, index)[:, 0], gather_rows(scores, index)[:, 0])
