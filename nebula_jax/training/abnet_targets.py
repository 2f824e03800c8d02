"""What ABNet's target side reads and predicts (section 3.2; ABNet's code).

Randomness is drawn per example: `example_keys` folds the example's id into a key, so
that micro-batches draw what the whole batch draws, and a row may be padded more. Fold
the epoch into the key of the target, which must be masked anew in every epoch; leave it
out on the source, so that H^E can be computed again, or sent as a difference to the
epoch before.

B batch, Q target length, P slots for predictions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.models import mask_slots
from nebula_jax.training import masking


class TargetInputs(NamedTuple):
    """The inputs of the target side and the labels of its predictions, for a batch.

    input_ids: [B, Q] int32, corrupted or shifted.
    attention_mask: [B, Q] bool, false at padding.
    positions: [P] int32, ascending places b Q + q that are predicted; B Q in empty
      slots.
    labels: [P] int32, the tokens to predict; 0 in empty slots.
    tokens: [] float32, tokens of the target rows, the divisor of the losses (ABNet's
      code, for the masked objective too, so that a row with more masks weighs more).
    dropped_targets: [] int32, places without a slot, which are not predicted.
    """

    input_ids: jax.Array
    attention_mask: jax.Array
    positions: jax.Array
    labels: jax.Array
    tokens: jax.Array
    dropped_targets: jax.Array


def example_keys(key: jax.Array, example_ids: jax.Array) -> jax.Array:
    """Derives a key for each example that does not depend on its batch.

    Args:
      example_ids: [B] int32 or uint32.

    Returns:
      [B] keys.
    """
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(example_ids)


def make(
    objective: str,
    keys: jax.Array,
    target_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    slots: int,
    policy: masking.Policy = masking.BERT,
) -> TargetInputs:
    """Makes inputs and labels of [B, Q], with the objective `ar` of [B, Q - 1].

    `ar` predicts every token but [CLS] from those before it, `cmlm` the pieces that
    `masking.mask_random_count` chooses.

    Args:
      objective: one of `abnet.OBJECTIVES`.
      keys: [B] keys, from `example_keys`; not used with `ar`.
      target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
      slots: P. `cmlm` chooses half of all tokens on average; choices beyond P, the last
        of the batch, are masked but not predicted (`TargetInputs.dropped_targets`).
      policy: shares of [MASK] and of random pieces.
    """
    if objective == "ar":
        input_ids, labels = target_ids[:, :-1], target_ids[:, 1:]
        is_target = labels != special.pad
    else:
        labels = target_ids
        input_ids, is_target = masking.mask_random_count(
            keys, target_ids, special, policy
        )
    positions = mask_slots.find(is_target.reshape(1, -1), slots)[0]
    return TargetInputs(
        input_ids,
        input_ids != special.pad,  # no random piece is padding
        positions,
        mask_slots.gather(labels.reshape(1, -1), positions[None])[0],
        jnp.sum(target_ids != special.pad, dtype=jnp.int32).astype(jnp.float32),
        jnp.sum(is_target, dtype=jnp.int32) - jnp.sum(positions < is_target.size),
    )
