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

from nebula_jax.data import masking
from nebula_jax.training import losses

LENGTH_WEIGHT = 0.1  # of the length loss beside the translation loss; ABNet's code
BERT = masking.POLICIES["bert"]


class Controls(NamedTuple):
    """Ids that are no text: `Controls(*words.special_ids, words.size)`."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    size: int
    """V, pieces of the vocabulary, these five included."""

    def among(self, ids: jax.Array) -> jax.Array:
        """Which of `ids` are no text; bool of the same shape."""
        return jnp.isin(ids, jnp.asarray(self[:5]))


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
    controls: Controls,
    slots: int,
    policy: masking.Policy = BERT,
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

    def corrupt(key, row):
        number_key, order_key, noise_key = jax.random.split(key, 3)
        pieces = _pieces(row, controls)
        chosen_count = jax.random.randint(
            number_key, (), 1, jnp.maximum(2, jnp.sum(pieces) + 1)
        )
        order = jnp.where(pieces, jax.random.uniform(order_key, row.shape), 2.0)
        rank = jnp.argsort(jnp.argsort(order))
        chosen = pieces & (rank < chosen_count)
        return _replace(noise_key, row, chosen, controls, policy), chosen

    input_ids, chosen = jax.vmap(corrupt)(keys, target_ids)
    return _questions(input_ids, target_ids, chosen, target_ids, controls, slots)


def autoregressive(target_ids: jax.Array, controls: Controls, slots: int) -> Questions:
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


def corrupt_span(
    keys: jax.Array,
    source_ids: jax.Array,
    controls: Controls,
    rate: float = 0.1,
    policy: masking.Policy = BERT,
) -> jax.Array:
    """ABNet's code corrupts the source as well; its paper and this one do not say so.

    A span of max(1, round(rate n)) + 1 of the n pieces: with probability 0.2 the first,
    with 0.2 the last, else anywhere. Its pieces become [MASK] or others, or stay.

    Args:
      keys: [B] keys, from `example_keys`.
      source_ids: [B, L] int32, padded.
      controls: of the source vocabulary.
      rate: see above.
      policy: what stands in the span.

    Returns:
      [B, L] int32.
    """

    def corrupt(key, row):
        side_key, start_key, noise_key = jax.random.split(key, 3)
        pieces = _pieces(row, controls)
        count = jnp.sum(pieces)
        wanted = jnp.maximum(1, jnp.round(rate * count).astype(jnp.int32)) + 1
        last = jnp.maximum(0, count - wanted)
        side = jax.random.uniform(side_key)
        start = jax.random.randint(start_key, (), 0, last + 1)
        start = jnp.where(side < 0.2, 0, jnp.where(side < 0.4, last, start))
        index = jnp.cumsum(pieces) - 1  # of the pieces, control pieces left out
        chosen = pieces & (index >= start) & (index < start + wanted)
        return _replace(noise_key, row, chosen, controls, policy)

    return jax.vmap(corrupt)(keys, source_ids)


def lengths(target_ids: jax.Array, controls: Controls) -> jax.Array:
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


def _pieces(ids: jax.Array, controls: Controls) -> jax.Array:
    """Where text is: no padding, no [CLS], no [SEP]."""
    return (ids != controls.pad) & (ids != controls.cls) & (ids != controls.sep)


def _replace(
    key: jax.Array,
    row: jax.Array,
    chosen: jax.Array,
    controls: Controls,
    policy: masking.Policy,
) -> jax.Array:
    dice_key, piece_key = jax.random.split(key)
    dice = jax.random.uniform(dice_key, row.shape)
    noise = jax.random.randint(piece_key, row.shape, 0, controls.size)
    noise = jnp.where(controls.among(noise), controls.mask, noise)
    written = jnp.where(dice < policy.mask + policy.random, noise, row)
    written = jnp.where(dice < policy.mask, controls.mask, written)
    return jnp.where(chosen, written, row).astype(row.dtype)


def _questions(input_ids, labels, asked, target_ids, controls, slots) -> Questions:
    positions = masking.find(asked.reshape(1, -1), slots)[0]
    return Questions(
        input_ids,
        input_ids != controls.pad,  # no random piece is padding
        positions,
        masking.gather(labels.reshape(1, -1), positions[None])[0],
        jnp.sum(lengths(target_ids, controls)).astype(jnp.float32),
        jnp.sum(asked, dtype=jnp.int32) - jnp.sum(positions < asked.size),
    )
