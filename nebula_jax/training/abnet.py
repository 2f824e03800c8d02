"""Scenario II, ABNet-Cloud: the two sides of the cut (section 3.2, Fig. 5).

An instance of `cut`: the front is PLM-S with its adapters and the length head, the back
PLM-T with its own and the loss. The parameters of each are those of `models.abnet`.
Both draw per example, so a key is the same for all micro-batches: it comes in the batch
of a half, whose own key is another one in each of them.

B batch (or micro-batch), L source length, Q target length, P slots for predictions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data import tokenizers
from nebula_jax.models import abnet
from nebula_jax.training import abnet_targets, losses, masking

LENGTH_WEIGHT = 0.1  # of the length loss beside the translation loss; ABNet's code
HELD_OUT_SEED = 0  # of the masks in `held_out`, whatever seed a run has


class SourceBatch(NamedTuple):
    """The micro-batch of cluster S.

    input_ids: [B, L] int32, padded.
    example_ids: [B] int32, numbers of the examples.
    lengths: [B] int32, tokens of their target rows; 0 with the objective `ar`.
    tokens: [] float32, target tokens of the whole batch; with `ar` 1.
    """

    input_ids: jax.Array
    example_ids: jax.Array
    lengths: jax.Array
    tokens: jax.Array


class TargetBatch(NamedTuple):
    """The micro-batch of cluster T.

    target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
    example_ids: [B] int32, numbers of the examples.
    tokens: [] float32, target tokens of the whole batch.
    slots: [P] of any values: its size is the number of slots for predictions.
    """

    target_ids: jax.Array
    example_ids: jax.Array
    tokens: jax.Array
    slots: jax.Array


class Task(NamedTuple):
    """The settings that both sides of a run share."""

    config: abnet.Config
    source_controls: tokenizers.SpecialTokens
    target_controls: tokenizers.SpecialTokens
    smoothing: float = 0.1
    """Smoothing of labels, ABNet's; printed as 1 in section 4.2."""
    source_corruption: float = 0.0
    """Share of a source sentence that is masked; ABNet's code has 0.1."""
    has_dropout: bool = True


def front(
    task: Task, params: Any, given: tuple[SourceBatch, jax.Array], rng: None = None
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Computes the hidden states of PLM-S (eq. 12) and the length loss.

    Args:
      given: the batch of cluster S, and the key of the run, not of the step: dropout is
        drawn per example, so that H^E may be sent as a difference to its value in the
        epoch before.
      rng: the half's own key, which has no use here.

    Returns:
      {"hidden": [B, L, D] float32, "mask": [B, L] bool, "index": [B] int32} and the
      length loss over the batch's tokens, [] float32.
    """
    batch, key = given
    keys = abnet_targets.example_keys(key, batch.example_ids)
    mask = batch.input_ids != task.source_controls.pad
    input_ids = batch.input_ids
    if task.source_corruption:
        noise = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        input_ids = masking.corrupt_span(
            noise, input_ids, task.source_controls, task.source_corruption
        )
    encoded = abnet.encode(
        task.config, params, input_ids, mask, keys if task.has_dropout else None
    )
    hidden = {"hidden": encoded.hidden, "mask": mask, "index": batch.example_ids}
    if encoded.length_logits is None:
        return hidden, jnp.zeros(())
    ones = jnp.ones(batch.lengths.shape, jnp.float32)
    loss = losses.masked_cross_entropy(encoded.length_logits, batch.lengths, ones)
    return hidden, LENGTH_WEIGHT * loss / batch.tokens


def back(
    task: Task,
    params: Any,
    hidden: dict[str, jax.Array],
    given: tuple[TargetBatch, jax.Array],
    rng: None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the translation loss with PLM-T (eq. 13), its labels smoothed.

    Args:
      given: the batch of cluster T, and the key of the step: a sentence is masked anew
        in every epoch.
      rng: as of `front`.

    Returns:
      The loss over the batch's tokens, [] float32, and metrics that add up over
      micro-batches: loss, tokens, predicted, correct, dropped_targets, and
      mismatched_examples, rows whose hidden states are another example's.
    """
    batch, key = given
    targets = abnet_targets.make(
        task.config.objective,
        abnet_targets.example_keys(key, batch.example_ids),
        batch.target_ids,
        task.target_controls,
        len(batch.slots),
    )
    keys = abnet_targets.example_keys(jax.random.fold_in(key, 1), batch.example_ids)
    logits = abnet.decode(
        task.config,
        params,
        targets.input_ids,
        targets.attention_mask,
        hidden["hidden"],
        hidden["mask"],
        targets.positions,
        keys if task.has_dropout else None,
    )
    is_target = targets.positions < targets.input_ids.size
    total = losses.label_smoothed_cross_entropy(
        logits, targets.labels, is_target.astype(jnp.float32), task.smoothing
    )
    loss = total / batch.tokens
    # Not argmax, which on CPU takes longer than all of the logits' gradient.
    of_label = jnp.take_along_axis(logits, targets.labels[:, None], axis=-1)[:, 0]
    correct = is_target & (of_label >= jnp.max(logits, axis=-1))
    return loss, {
        "loss": loss,
        "tokens": targets.tokens,
        "predicted": jnp.sum(is_target, dtype=jnp.float32),
        "correct": jnp.sum(correct, dtype=jnp.float32),
        "dropped_targets": targets.dropped_targets.astype(jnp.float32),
        "mismatched_examples": jnp.sum(
            hidden["index"] != batch.example_ids, dtype=jnp.float32
        ),
    }


def held_out(
    task: Task, params: Any, hidden: dict[str, jax.Array], target_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the loss of each sentence, teacher-forced, without dropout or smoothing.

    With the objective `ar` each token but [CLS] is predicted from those before it. With
    `cmlm` m ~ U{1..n} of a row's n pieces are [MASK], and these are predicted, as in
    mask-predict; they follow from the example's number alone, so that they are the same
    in every run.

    Args:
      hidden: from `front`, or as it is sent to be translated: `index` has the numbers
        of the examples.
      target_ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.

    Returns:
      [B] float32, nats, and [B] int32, predicted tokens.
    """
    key = jax.random.key(HELD_OUT_SEED)
    targets = abnet_targets.make(
        task.config.objective,
        abnet_targets.example_keys(key, hidden["index"]),
        target_ids,
        task.target_controls,
        target_ids.size,
        masking.POLICIES["mask"],
    )
    logits = abnet.decode(
        task.config,
        params,
        targets.input_ids,
        targets.attention_mask,
        hidden["hidden"],
        hidden["mask"],
        targets.positions,
    )
    rows, columns = targets.input_ids.shape
    row = targets.positions // columns  # B in an empty slot, which is no row
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets.labels)
    nats = jnp.zeros(rows).at[row].add(each, mode="drop")
    return nats, jnp.zeros(rows, jnp.int32).at[row].add(1, mode="drop")
