"""Mask-predict (section 4.2; Ghazvininejad et al. 2019, ABNet's code).

Jittable, of fixed shapes, and independent of the model, which is an argument.

B sentences, N hypotheses (length candidates) of a sentence, Q longest target row,
T lengths that have a logit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.evaluation import hypotheses

Predict = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(input_ids [B, N, Q], wanted [B, N, Q] bool) -> best pieces [B, N, Q] int32 and their
log-probabilities [B, N, Q] float32; arbitrary where not wanted."""

SHORTEST = 3
"""Length of a target row: [CLS], a piece and [SEP]. (ABNet's, without [CLS], is 2.)"""


def length_candidates(length_logits: jax.Array, candidates: int) -> jax.Array:
    """Selects the likeliest lengths.

    (The paper's "beam_sizes = 4" is ABNet's number of length candidates with the
    masked objective.)

    Args:
      length_logits: [B, T] float32.

    Returns:
      [B, N] int32, likeliest first.
    """
    allowed = jnp.arange(length_logits.shape[-1])[None] >= SHORTEST
    _, best = jax.lax.top_k(jnp.where(allowed, length_logits, -jnp.inf), candidates)
    return jnp.maximum(best, SHORTEST).astype(jnp.int32)


def search(
    predict: Predict,
    lengths: jax.Array,
    special: tokenizers.SpecialTokens,
    max_length: int,
    iterations: int = 10,
) -> hypotheses.Translations:
    """Predicts all pieces at once, then the least certain ones again and again.

    After pass 0, in which all n pieces are masked, pass i = 1 ... I masks the
    max(1, floor(n (1 - i / I))) of lowest probability and predicts these; the others
    stay. So there are I + 1 passes (ABNet's code).

    Args:
      predict: see `Predict`.
      lengths: [B, N] int32, of target rows, special tokens included.
      max_length: Q; longer lengths are cut to it.

    Returns:
      The best of the N hypotheses of each sentence, by Σ log p over length penalty.
    """
    lengths = jnp.minimum(lengths, max_length)
    place = jnp.arange(max_length)[None, None]
    last = lengths[..., None] - 1
    pieces = (place > 0) & (place < last)
    count = jnp.sum(pieces, axis=-1, keepdims=True)
    template = jnp.where(pieces, special.mask, special.pad)
    template = jnp.where(place == 0, special.cls, template)
    template = jnp.where(place == last, special.sep, template).astype(jnp.int32)

    def predict_again(
        ids: jax.Array, log_probs: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        masked = jnp.where(wanted, special.mask, ids)
        best, best_log_probs = predict(masked, wanted)
        return (
            jnp.where(wanted, best, ids),
            jnp.where(wanted, best_log_probs, log_probs),
        )

    def iterate(
        i: jax.Array, filled: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        ids, log_probs = filled
        wanted = jnp.maximum(1, count * (iterations - i) // iterations)
        doubtful = jnp.where(pieces, log_probs, jnp.inf)
        rank = jnp.argsort(jnp.argsort(doubtful, axis=-1), axis=-1)
        return predict_again(ids, log_probs, pieces & (rank < wanted))

    filled = predict_again(template, jnp.zeros(template.shape), pieces)
    ids, log_probs = jax.lax.fori_loop(1, iterations + 1, iterate, filled)

    penalty = hypotheses.length_penalty(lengths - 1)
    return hypotheses.best(ids, jnp.sum(log_probs, axis=-1) / penalty)
