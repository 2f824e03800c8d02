"""What ABNet's two sides are asked while training (section 3.2; ABNet's code).

Each side makes its own from its own sentences. Randomness belongs to the example, not
to the batch: `example_keys` folds the example's id into a key, so that micro-batches
draw what the whole batch draws, and a row may be padded more. Fold the epoch into the
key of the target, which must be masked anew each time; leave it out on the source, so
that H^E can be computed again, or sent as a difference to the epoch before.

B batch, L source length, Q target length, P slots for predictions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.models import mask_slots
from nebula_jax.training import losses, masking

LENGTH_WEIGHT = 0.1  # of the length loss beside the translation loss; ABNet's code


class Questions(NamedTuple):
    """What the target side is asked of a batch.

    input_ids: [B, Q] int32, what it reads.
    attention_mask: [B, Q] bool, false at padding.
    positions: [P] int32, ascending places b Q + q where it is asked; B Q in empty
      slots.
    labels: [P] int32, the answers; 0 in empty slots.
    tokens: [] float32, tokens of the target rows: what losses are divided by (ABNet's
      code, for the masked objective too, so that a row with more masks weighs more).
    unasked: [] int32, places that found no slot.
    """

    input_ids: jax.Array
    attention_mask: jax.Array
    positions: jax.Array
    labels: jax.Array
    tokens: jax.Array
    unasked: jax.Array


def example_keys(key: jax.Array, example_ids: jax.Array) -> jax.Array:
    """[B] keys: of every example the same in whatever batch it stands.

    Args:
      key: of the run, or of the epoch.
      example_ids: [B] int32 or uint32.
    """
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(example_ids)


def conditional_masked(
    keys: jax.Array,
    target_ids: jax.Array,
    controls: tokenizers.SpecialTokens,
    slots: int,
    policy: masking.Policy = masking.BERT,
) -> Questions:
    """The conditional masked language model's corruption of the target.

    Of a row's n pieces, m ~ U{1..n} are chosen, uniformly and without replacement; of
    these, 80 % become [MASK], 10 % a random piece, 10 % stay. Unlike in ABNet's code
    [SEP] is never chosen: the length, which is given when decoding, says where it is.

    Args:
      keys: [B] keys, from `example_keys`.
      target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
      controls: of the target vocabulary.
      slots: P. Half of all tokens are chosen on average; choices beyond P, the last of
        the batch, are masked but not asked (`Questions.unasked`).
      policy: what stands at chosen positions.

    Returns:
      Questions.
    """
    input_ids, chosen = masking.mask_random_count(keys, target_ids, controls, policy)
    return _questions(input_ids, target_ids, chosen, target_ids, controls, slots)


def autoregressive(
    target_ids: jax.Array, controls: tokenizers.SpecialTokens, slots: int
) -> Questions:
    """Every token from those before it: reads all but the last, is asked all but [CLS].

    Args:
      target_ids: [B, Q + 1] int32, [CLS] y_1 ... y_n [SEP], padded.
      controls: of the target vocabulary.
      slots: P, as in `conditional_masked`.

    Returns:
      Questions about [B, Q].
    """
    labels = target_ids[:, 1:]
    asked = labels != controls.pad
    return _questions(target_ids[:, :-1], labels, asked, target_ids, controls, slots)


def lengths(target_ids: jax.Array, controls: tokenizers.SpecialTokens) -> jax.Array:
    """[B, Q] -> [B] int32: tokens of each row, [CLS] and [SEP] included.

    The one label that cluster T tells cluster S.
    """
    return jnp.sum(target_ids != controls.pad, axis=-1, dtype=jnp.int32)


def translation_loss(
    logits: jax.Array, questions: Questions, smoothing: float = 0.1
) -> tuple[jax.Array, jax.Array]:
    """Label-smoothed cross-entropy of the answers.

    (The paper's "label smoothing of value = 1" is ABNet's 0.1.)

    Args:
      logits: [P, V] float32.
      questions: that they answer.
      smoothing: ε.

    Returns:
      Sum of the losses, and the number of target tokens.
    """
    asked = questions.positions < questions.input_ids.size
    total, _ = losses.label_smoothed_cross_entropy(
        logits, questions.labels, asked.astype(jnp.float32), smoothing
    )
    return total, questions.tokens


def length_loss(
    length_logits: jax.Array, lengths: jax.Array, weight: float = LENGTH_WEIGHT
) -> tuple[jax.Array, jax.Array]:
    """-Σ log p(length), times its weight; added to the translation loss.

    Args:
      length_logits: [B, T] float32, of `abnet.Encoded`.
      lengths: [B] int32, from cluster T.
      weight: 0.1 in ABNet's code.

    Returns:
      The weighted sum, and the number of target tokens: what the lengths add up to, so
      that S divides by the same number as T without being told.
    """
    total, _ = losses.masked_cross_entropy(
        length_logits, lengths, jnp.ones(lengths.shape, jnp.float32)
    )
    return weight * total, jnp.sum(lengths).astype(jnp.float32)


def _questions(input_ids, labels, asked, target_ids, controls, slots) -> Questions:
    positions = mask_slots.find(asked.reshape(1, -1), slots)[0]
    return Questions(
        input_ids,
        input_ids != controls.pad,  # no random piece is padding
        positions,
        mask_slots.gather(labels.reshape(1, -1), positions[None])[0],
        jnp.sum(lengths(target_ids, controls)).astype(jnp.float32),
        jnp.sum(asked, dtype=jnp.int32) - jnp.sum(positions < asked.size),
    )
