"""Scenario II, ABNet-Cloud: the two sides of the cut (section 3.2, Fig. 5).

An instance of `cut`: the front is PLM-S with its adapters and the length head, the back
PLM-T with its own and the loss. The parameters of each are those of `models.abnet`.
Both draw per example (`masking.example_keys`), so a key is the same for all
micro-batches: it comes in the batch of a half, whose own key is another one in each of
them. So micro-batches draw what the whole batch draws, and a row may be padded more.
Fold the epoch into the key of the target, which must be masked anew in every epoch;
leave it out on the source, so that H^E can be computed again, or sent as a difference
to the epoch before.

B batch (or micro-batch), L source length, Q target length, P slots for predictions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data import tokenizers
from nebula_jax.models import abnet, mask_slots, masked_lm, transformer
from nebula_jax.training import losses, masking
from nebula_jax.training import state as train_state

LENGTH_WEIGHT = 0.1  # of the length loss beside the translation loss; ABNet's code
HELD_OUT_SEED = 0  # of the masks in `held_out`, whatever seed a run has


class SourceBatch(NamedTuple):
    """The micro-batch of cluster S."""

    input_ids: jax.Array  # [B, L] int32, padded
    example_ids: jax.Array  # [B] int32, numbers of the examples
    lengths: jax.Array  # [B] int32, tokens of their target rows; 0 with `ar`
    tokens: jax.Array  # [] float32, target tokens of the whole batch; 1 with `ar`


class TargetBatch(NamedTuple):
    """The micro-batch of cluster T."""

    target_ids: jax.Array  # [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded
    example_ids: jax.Array  # [B] int32, numbers of the examples
    tokens: jax.Array  # [] float32, target tokens of the whole batch
    slots: jax.Array  # [P] of any values: its size is P


class TargetInputs(NamedTuple):
    """The inputs of the target side and the labels of its predictions, for a batch.

    The divisor of the losses is `tokens` with the masked objective too, so that a row
    with more masks weighs more (ABNet's code).
    """

    input_ids: jax.Array  # [B, Q] int32, corrupted or shifted
    attention_mask: jax.Array  # [B, Q] bool, false at padding
    positions: jax.Array  # [P] int32, ascending b Q + q; B Q in empty slots
    labels: jax.Array  # [P] int32, the tokens to predict; 0 in empty slots
    tokens: jax.Array  # [] float32, tokens of the target rows
    dropped_targets: jax.Array  # [] int32, places without a slot, not predicted


class Task(NamedTuple):
    """The settings that both sides of a run share."""

    config: abnet.Config
    source_controls: tokenizers.SpecialTokens
    target_controls: tokenizers.SpecialTokens
    smoothing: float = 0.1  # smoothing of labels, ABNet's; printed as 1 in section 4.2
    source_corruption: float = 0.0  # masked share of a source; ABNet's code has 0.1
    has_dropout: bool = True


def targets_of(
    objective: str,
    keys: jax.Array,
    target_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    slots: int,
    policy: masking.Policy = masking.BERT,
) -> TargetInputs:
    """Makes inputs and labels of [B, Q], with the objective `ar` of [B, Q - 1].

    `ar` predicts every token but [CLS] from those before it, `cmlm` the pieces that
    `masking.mask_random_count` chooses, half of all tokens on average. Choices beyond
    P, the last of the batch, are masked but not predicted (`dropped_targets`). The keys
    [B] are from `masking.example_keys`, and not used with `ar`; target ids are int32,
    [CLS] y_1 ... y_n [SEP], padded; `slots` is P.
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


def front(
    task: Task, params: Any, given: tuple[SourceBatch, jax.Array], rng: None = None
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Computes the hidden states of PLM-S (eq. 12) and the length loss.

    Of the batch of cluster S and the key of the run, not of the step: dropout is drawn
    per example, so that H^E may be sent as a difference to its value in the epoch
    before. (The half's own key, `rng`, has no use here.) Returns {"hidden": [B, L, D]
    float32, "mask": [B, L] bool, "index": [B] int32} and the length loss over the
    batch's tokens, [] float32.
    """
    batch, key = given
    keys = masking.example_keys(key, batch.example_ids)
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

    Of the batch of cluster T and the key of the step: a sentence is masked anew in
    every epoch. Returns the loss over the batch's tokens, [] float32, and metrics that
    add up over micro-batches: loss, tokens, predicted, correct, dropped_targets, and
    mismatched_examples, rows whose hidden states are another example's.
    """
    batch, key = given
    targets = targets_of(
        task.config.objective,
        masking.example_keys(key, batch.example_ids),
        batch.target_ids,
        task.target_controls,
        len(batch.slots),
    )
    keys = masking.example_keys(jax.random.fold_in(key, 1), batch.example_ids)
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
    mask-predict; they follow from the example's number alone (`index` of the hidden
    states that `front` makes), so that they are the same in every run. Targets [B, Q]
    int32 are padded. Returns [B] float32, nats, and [B] int32, predicted tokens.
    """
    key = jax.random.key(HELD_OUT_SEED)
    targets = targets_of(
        task.config.objective,
        masking.example_keys(key, hidden["index"]),
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


def init_head(config: transformer.Config, rng: jax.Array) -> Any:
    """Draws the parameters of an MLM head."""
    hidden = jnp.zeros((1, 1, config.width))
    table = jnp.zeros((config.vocab_size, config.embedding_width or config.width))
    return masked_lm.MLMHead(config).init(rng, hidden, table)["params"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=5)
def head_step(
    config: transformer.Config,
    special: tokenizers.SpecialTokens,
    objective: str,
    slots: int,
    optimizer: optax.GradientTransformation,
    state: train_state.TrainState,
    encoder: Any,
    target_ids: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """Takes one optimization step of an MLM head for a model that has none.

    The encoder ({"embeddings", "encoder"} parameters) is frozen and has no dropout. The
    head predicts what it will predict in the translator: masked pieces, or the next
    one. Targets are [B, Q] int32, padded. Returns the next state, and scalars: loss
    (mean of a prediction), is_finite.
    """
    keys = masking.example_keys(state.key(), jnp.arange(len(target_ids)))
    targets = targets_of(objective, keys, target_ids, special, slots)
    mask = targets.attention_mask
    if objective == "ar":
        mask = mask[:, None, :] & transformer.causal_mask(mask.shape[-1])
    hidden = transformer.hidden_states(config, encoder, targets.input_ids, mask)
    hidden = mask_slots.gather_positions(hidden, targets.positions)
    table = encoder["embeddings"]["word_embeddings"]["embedding"]
    is_target = targets.positions < targets.input_ids.size
    weights = is_target.astype(jnp.float32)

    def loss(head: Any) -> jax.Array:
        module = masked_lm.MLMHead(config)
        logits = module.apply({"params": head}, hidden[None], table)[0]
        entropy = losses.label_smoothed_cross_entropy(
            logits, targets.labels, weights, smoothing=0.0
        )
        return losses.mean(entropy, jnp.sum(weights))

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads, optimizer, {"loss": value})
