"""Predictions of M3's discriminator on held-out text.

B batch, L length, M mask capacity.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import electra, mask_slots
from nebula_jax.training import m3


class Predictions(NamedTuple):
    """The discriminator's predictions on a batch, for evaluation.

    replaced_score: [B, L] float32, log-odds that the token was replaced.
    replaced: [B, L] bool, the truth.
    text: [B, L] bool, true where a token is text (no padding, no control piece).
    clm_correct: [] int32, masked positions whose original CLM predicted.
    sampled_correct: [] int32, masked positions whose original the generator sampled.
    masked: [] int32, masked positions.
    """

    replaced_score: jax.Array
    replaced: jax.Array
    text: jax.Array
    clm_correct: jax.Array
    sampled_correct: jax.Array
    masked: jax.Array


def predict(config: m3.Config, params: Any, tokens: m3.Tokens) -> Predictions:
    """Applies the discriminator to `tokens` without dropout."""
    inputs = m3.inputs_of(tokens)
    rtd_logits, clm_logits = electra.Discriminator(config.discriminator).apply(
        {"params": params}, tokens.input_ids, inputs.attention_mask, inputs.positions
    )
    sampled = mask_slots.gather(tokens.input_ids, inputs.positions)
    predicted = jnp.argmax(clm_logits, axis=-1)
    filled = inputs.filled > 0
    return Predictions(
        replaced_score=-rtd_logits,
        replaced=~inputs.is_original,
        text=(tokens.input_ids >= vocabularies.NUM_SPECIAL) | tokens.masked,
        clm_correct=jnp.sum((predicted == tokens.originals) & filled),
        sampled_correct=jnp.sum((sampled == tokens.originals) & filled),
        masked=jnp.sum(filled),
    )
