"""Training of an MLM head for a pretrained model that has none.

It uses text of the model's cluster. The encoder is frozen, so no gradient passes
through it. The head predicts what it will predict in the translator: masked pieces, or
the next piece.

B batch, Q length, P slots for predictions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data import tokenizers
from nebula_jax.models import heads, mask_slots, transformer
from nebula_jax.training import abnet_targets, losses
from nebula_jax.training import state as train_state


def init_head(config: transformer.Config, rng: jax.Array) -> Any:
    """Draws the parameters of an MLM head."""
    hidden = jnp.zeros((1, 1, config.width))
    table = jnp.zeros((config.vocab_size, config.embedding_width or config.width))
    return heads.MLMHead(config).init(rng, hidden, table)["params"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=5)
def step(
    config: transformer.Config,
    special: tokenizers.SpecialTokens,
    objective: str,
    slots: int,
    optimizer: optax.GradientTransformation,
    state: train_state.TrainState,
    encoder: Any,
    target_ids: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """Takes one optimization step of the head.

    Args:
      config: of the encoder; its dropout is not used.
      objective: one of `abnet.OBJECTIVES`.
      encoder: {"embeddings", "encoder"} parameters, frozen.
      target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.

    Returns:
      The next state, and scalars: loss (mean of a prediction), is_finite.
    """
    keys = abnet_targets.example_keys(state.key(), jnp.arange(len(target_ids)))
    targets = abnet_targets.make(objective, keys, target_ids, special, slots)
    mask = targets.attention_mask
    if objective == "ar":
        mask = mask[:, None, :] & transformer.causal_mask(mask.shape[-1])
    hidden = transformer.hidden_states(config, encoder, targets.input_ids, mask)
    hidden = mask_slots.gather_positions(hidden, targets.positions)
    table = encoder["embeddings"]["word_embeddings"]["embedding"]
    is_target = targets.positions < targets.input_ids.size
    weights = is_target.astype(jnp.float32)

    def loss(head: Any) -> jax.Array:
        logits = heads.MLMHead(config).apply({"params": head}, hidden[None], table)[0]
        entropy = losses.label_smoothed_cross_entropy(
            logits, targets.labels, weights, smoothing=0.0
        )
        return losses.mean(entropy, jnp.sum(weights))

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads, optimizer, {"loss": value})
