"""Probes of M3's discriminator: its predictions, its sentences, its gradients.

B batch, L length, D width, M mask capacity.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots, masked_lm, transformer
from nebula_jax.training import accumulate, m3, m3_steps, partition, warm_start


class Predictions(NamedTuple):
    """The discriminator's predictions on a batch, for evaluation."""

    replaced_score: jax.Array  # [B, L] float32, log-odds that the token was replaced
    replaced: jax.Array  # [B, L] bool, the truth
    text: jax.Array  # [B, L] bool, true at text: no padding, no control piece
    clm_correct: jax.Array  # [] int32, masked positions whose original CLM predicted
    sampled_correct: jax.Array  # [] int32, those whose original the generator sampled
    masked: jax.Array  # [] int32, masked positions
    originals: jax.Array  # [B, M] int32, the tokens there; 0 in empty slots
    input_ids: jax.Array  # [B, L] int32, the text with its fakes
    masked_at: jax.Array  # [B, L] bool, the masked positions


def corrupt(
    config: m3.Config, params: Any, rng: jax.Array, input_ids: jax.Array
) -> m3.Tokens:
    """Corrupts held-out text [B, L] as the generator does, without dropout."""
    return m3.generator_loss(config, params, rng, input_ids, training=False)[1][0]


def predict(config: m3.Config, params: Any, tokens: m3.Tokens) -> Predictions:
    """Applies the discriminator to `tokens` without dropout."""
    inputs = m3.inputs_of(tokens)
    rtd_logits, clm_logits = masked_lm.Discriminator(config.discriminator).apply(
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
        originals=tokens.originals,
        input_ids=tokens.input_ids,
        masked_at=tokens.masked,
    )


def sentence_vectors(config: m3.Config, params: Any, input_ids: jax.Array) -> jax.Array:
    """Returns the mean hidden state, [B, D] float32, of text [B, L] int32, padded."""
    shape, is_token = config.discriminator, input_ids != vocabularies.SPECIAL.pad
    hidden = transformer.hidden_states(shape, params, input_ids, is_token)
    weight = is_token.astype(jnp.float32)[..., None]
    total = jnp.sum(hidden.astype(jnp.float32) * weight, axis=1)
    return total / jnp.maximum(jnp.sum(weight, axis=1), 1)


def gradient_norms(
    config: m3.Config, params: Any, tokens: Sequence[m3.Tokens]
) -> dict[str, jax.Array]:
    """Returns the norms of the gradients of both terms of eq. 11, [] float32 each.

    Of each term's share of the loss, with its weight, without dropout: in the encoder
    with its embeddings, and in the heads. `tokens` are those of one step.
    """
    found = {}
    quiet = dataclasses.replace(config.discriminator, dropout=0.0)
    config = dataclasses.replace(config, discriminator=quiet, start=warm_start.NONE)
    joined = m3_steps.join(tokens)
    terms = {
        "rtd": dataclasses.replace(config, clm_weight=0.0),
        "clm": dataclasses.replace(config, rtd_weight=0.0),
    }
    for name, alone in terms.items():
        part, batch, _ = m3.discriminator_parts(alone, jax.random.key(0), joined)
        grads, _ = accumulate.gradients(part, params, batch, config.micro_batches)
        heads, encoder = partition.split(grads, warm_start.is_head)
        found[f"{name}_heads_gradient"] = optax.tree.norm(heads)
        found[f"{name}_encoder_gradient"] = optax.tree.norm(encoder)
    return found
