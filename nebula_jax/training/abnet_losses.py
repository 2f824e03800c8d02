"""Training inputs and losses of ABNet (section 3.2; ABNet's code).

Each side makes its own from its own sentences. Randomness is drawn per example:
`example_keys` folds the example's id into a key, so that micro-batches draw what the
whole batch draws, and a row may be padded more. Fold the epoch into the key of the
target, which must be masked anew in every epoch; leave it out on the source, so that
H^E can be computed again, or sent as a difference to the epoch before.

B batch, L source length, Q target length, P slots for predictions, V vocabulary of the
target, T lengths that can be predicted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data import tokenizers
from nebula_jax.models import mask_slots
from nebula_jax.training import losses, masking

LENGTH_WEIGHT = 0.1  # of the length loss beside the translation loss; ABNet's code


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
      key: of the run, or of the epoch.
      example_ids: [B] int32 or uint32.

    Returns:
      [B] keys.
    """
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(example_ids)


def conditional_masked(
    keys: jax.Array,
    target_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    slots: int,
    policy: masking.Policy = masking.BERT,
) -> TargetInputs:
    """Corrupts targets for the conditional masked language model.

    Of a row's n pieces, m ~ U{1..n} are chosen, uniformly and without replacement; of
    these, 80 % become [MASK], 10 % a random piece, 10 % stay. Unlike in ABNet's code
    [SEP] is never chosen: the length, which is given when decoding, implies its place.

    Args:
      keys: [B] keys, from `example_keys`.
      target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
      slots: P. Half of all tokens are chosen on average; choices beyond P, the last of
        the batch, are masked but not predicted (`TargetInputs.dropped_targets`).
      policy: shares of [MASK] and of random pieces.
    """
    input_ids, chosen = masking.mask_random_count(keys, target_ids, special, policy)
    return _target_inputs(input_ids, target_ids, chosen, target_ids, special, slots)


def autoregressive(
    target_ids: jax.Array, special: tokenizers.SpecialTokens, slots: int
) -> TargetInputs:
    """Shifts targets for a causal model: every token is predicted from those before it.

    Args:
      target_ids: [B, Q + 1] int32, [CLS] y_1 ... y_n [SEP], padded.
      slots: P, as in `conditional_masked`.

    Returns:
      TargetInputs of [B, Q]: all tokens but the last, which predict all but [CLS].
    """
    labels = target_ids[:, 1:]
    is_target = labels != special.pad
    shifted = target_ids[:, :-1]
    return _target_inputs(shifted, labels, is_target, target_ids, special, slots)


def translation_loss(
    logits: jax.Array, targets: TargetInputs, smoothing: float = 0.1
) -> jax.Array:
    """Computes the label-smoothed cross-entropy of the predictions.

    (The paper's "label smoothing of value = 1" is ABNet's 0.1.)

    Args:
      logits: [P, V] float32.
      targets: with the labels of these predictions.
      smoothing: ε.

    Returns:
      Sum of the losses, [] float32.
    """
    is_target = targets.positions < targets.input_ids.size
    return losses.label_smoothed_cross_entropy(
        logits, targets.labels, is_target.astype(jnp.float32), smoothing
    )[0]


def sentence_losses(
    logits: jax.Array, targets: TargetInputs
) -> tuple[jax.Array, jax.Array]:
    """Computes -Σ log p(y_q) of each row, and how many of its tokens are predicted.

    Args:
      logits: [P, V] float32.
      targets: with the labels of these predictions.

    Returns:
      [B] float32, nats, and [B] int32.
    """
    rows, columns = targets.input_ids.shape
    row = targets.positions // columns  # B in an empty slot, which is no row
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets.labels)
    nats = jnp.zeros(rows).at[row].add(each, mode="drop")
    return nats, jnp.zeros(rows, jnp.int32).at[row].add(1, mode="drop")


def length_loss(length_logits: jax.Array, lengths: jax.Array) -> jax.Array:
    """Computes -Σ log p(length) times LENGTH_WEIGHT, a part of the total loss.

    Args:
      length_logits: [B, T] float32, of `abnet.Encoded`.
      lengths: [B] int32, from cluster T.

    Returns:
      [] float32. S divides it by the sum of the lengths, the number that T divides by.
    """
    total, _ = losses.masked_cross_entropy(
        length_logits, lengths, jnp.ones(lengths.shape, jnp.float32)
    )
    return LENGTH_WEIGHT * total


def _target_inputs(
    input_ids: jax.Array,
    labels: jax.Array,
    is_target: jax.Array,
    target_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    slots: int,
) -> TargetInputs:
    """Gathers the labels [B, Q] where is_target [B, Q] into P slots."""
    positions = mask_slots.find(is_target.reshape(1, -1), slots)[0]
    return TargetInputs(
        input_ids,
        input_ids != special.pad,  # no random piece is padding
        positions,
        mask_slots.gather(labels.reshape(1, -1), positions[None])[0],
        jnp.sum(target_ids != special.pad, dtype=jnp.int32).astype(jnp.float32),
        jnp.sum(is_target, dtype=jnp.int32) - jnp.sum(positions < is_target.size),
    )
