"""Distillation: a student learns from the masked language models of several teachers.

A teacher answers what stands at the masked places of the student's text: with the K
pieces that it holds most likely at each, and how likely all others are together. The
student's loss at a place, with p its own distribution, x the piece that was masked and
q_t the answer of teacher t, is

    (1 - s) CE(x, p) + s Σ_t w_t CE(q_t, p)

(1503.02531, at temperature 1). A cross-entropy is linear in its target, so the second
sum is that of the mixture Σ_t w_t q_t.

The weights are given, or learned: w = softmax(scores) maximizes the likelihood of the
masked pieces under the mixture, the mean of log Σ_t w_t q_t(x). The student's loss is
no measure of it: its minimum gives all weight to the teacher that is easiest to
imitate.

B rows, L length, M slots for masked pieces in a row, K pieces of an answer, T teachers,
V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.models import mask_slots, masked_lm, transformer
from nebula_jax.training import bert, losses, masking

_TINY = 1e-6  # the least probability that is told apart from 0


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings that determine the arithmetic of a student."""

    model: bert.Config  # the student, and how it would learn alone
    share: float = 0.5  # share of the teachers in the loss, s
    weight_rate: float = 0.0  # step size of the scores; 0 for weights that are given


class Question(NamedTuple):
    """A batch as it is sent to a teacher; of places to answer, some are no [MASK]."""

    input_ids: jax.Array  # [B, L] int32, masked
    is_masked: jax.Array  # [B, L] bool, true at the places to be answered


class Answer(NamedTuple):
    """A teacher's likely pieces at masked places; of an empty slot anything."""

    pieces: jax.Array  # [B, M, K] int32
    log_probs: jax.Array  # [B, M, K] float32, logits less their logsumexp over V


@functools.partial(jax.jit, static_argnums=0)
def masked(
    config: bert.Config, rng: jax.Array, step: jax.Array, input_ids: jax.Array
) -> tuple[masking.Masked, Question]:
    """Masks [B, L] int32, padded text, as `bert.step` does; the second is for teachers.

    `rng` is the key of the state of `bert.init`; steps [] int32 count from 1.
    """
    mask_rng, _ = jax.random.split(jax.random.fold_in(rng, step - 1))
    rows = bert.mask(config, mask_rng, input_ids)
    marks = mask_slots.mark(rows.positions, input_ids.shape[-1])
    return rows, Question(rows.input_ids, marks)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def answer(
    encoder: transformer.Config, slots: int, count: int, params: Any, asked: Question
) -> Answer:
    """Answers a question with `count` pieces, by a `masked_lm.MaskedLM`'s `params`."""
    places = mask_slots.find(asked.is_masked, slots)
    is_text = asked.input_ids != bert.PAD
    model = masked_lm.MaskedLM(encoder)
    logits = model.apply({"params": params}, asked.input_ids, is_text, places)
    largest, pieces = jax.lax.top_k(logits, count)
    rest = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Answer(pieces, largest - rest)


def probabilities(answered: Answer) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities of an answer's pieces [B, M, K], and of others [B, M].

    What crossed may be rounded, or be another's: they are at least 0, and sum to 1.
    """
    found = jnp.exp(jnp.minimum(answered.log_probs, 0.0))
    total = jnp.sum(found, axis=-1)
    found /= jnp.maximum(total, 1.0)[..., None]
    return found, jnp.maximum(0.0, 1.0 - total)


def imitation(logits: jax.Array, answered: Answer) -> jax.Array:
    """Computes CE(q, p) of a student's logits [B, M, V]; returns [B, M] float32, nats.

    All pieces that a teacher did not name are one.
    """
    likely, rest = probabilities(answered)
    own = jnp.take_along_axis(logits, answered.pieces, axis=-1)
    own -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own_rest = jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(own), axis=-1), _TINY))
    return -jnp.sum(likely * own, axis=-1) - rest * own_rest


def likelihood(answered: Answer, originals: jax.Array, vocab_size: int) -> jax.Array:
    """Returns q(x) of masked pieces [B, M] int32: [B, M] float32, above 0.

    What a teacher did not name is spread evenly.
    """
    likely, rest = probabilities(answered)
    is_original = answered.pieces == originals[..., None]
    named = jnp.sum(likely * is_original, axis=-1)
    others = max(1, vocab_size - answered.pieces.shape[-1])
    found = jnp.where(jnp.any(is_original, axis=-1), named, rest / others)
    return jnp.maximum(found, _TINY / vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def gradients(
    config: Config,
    params: Any,
    scores: jax.Array,
    rows: masking.Masked,
    answers: Sequence[Answer],
    rng: jax.Array,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Computes the student's gradient, and the next scores of its teachers.

    `params` are a `masked_lm.MaskedLM`'s, scores [T] float32, and the T answers in the
    teachers' order. Scalars come too: loss, mlm_loss (its first part, in nats a masked
    piece), imitation (its second), weight_0 ... of the teachers, tokens.
    """
    model = masked_lm.MaskedLM(config.model.encoder)
    is_text = rows.input_ids != bert.PAD
    is_masked = rows.positions < rows.input_ids.shape[-1]
    counts = is_masked.astype(jnp.float32)
    count = jnp.sum(counts)
    weights = jax.nn.softmax(scores)

    def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = model.apply(
            {"params": params},
            rows.input_ids,
            is_text,
            rows.positions,
            not config.model.encoder.dropout,
            rngs={"dropout": rng},
        )
        own = losses.masked_cross_entropy(logits, rows.originals, counts)
        each = jnp.stack([imitation(logits, answered) for answered in answers])
        mixed = jnp.sum(jnp.einsum("t,tbm->bm", weights, each) * counts)
        parts = losses.mean(own, count), losses.mean(mixed, count)
        total = (1 - config.share) * parts[0] + config.share * parts[1]
        return total, {"loss": total, "mlm_loss": parts[0], "imitation": parts[1]}

    grads, metrics = jax.grad(loss, has_aux=True)(params)
    vocab_size = config.model.encoder.vocab_size
    found = [likelihood(each, rows.originals, vocab_size) for each in answers]
    joint = jnp.einsum("t,tbm->tbm", weights, jnp.stack(found))
    # The gradient of the mean log-likelihood by the scores: by how much the share of a
    # teacher in explaining the pieces is above its weight.
    explained = counts / jnp.sum(joint, axis=0)
    shares = jnp.einsum("tbm,bm->t", joint, explained)
    shares /= jnp.maximum(count, 1.0)
    scores += config.weight_rate * (shares - weights)
    metrics |= {f"weight_{t}": weights[t] for t in range(len(answers))}
    return grads, scores, metrics | {"tokens": jnp.sum(is_text)}
