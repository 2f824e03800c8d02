"""Beam search (section 4.2; fairseq's rules).

Jittable, of fixed shapes, and independent of the model, which is an argument.

B sentences, N hypotheses (beams) of a sentence, Q longest target row, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.evaluation import hypotheses

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(tokens [B N] int32, position [] int32, state) -> logits [B N, V] float32 of the next
token, and the next state, whose leaves begin with an axis [B N]."""


class _Rules(NamedTuple):
    """The arguments of `search` that its functions share."""

    special: tokenizers.SpecialTokens
    max_length: int
    beams: int


class _Beams(NamedTuple):
    position: jax.Array  # [] int32, of the newest token
    ids: jax.Array  # [B, N, Q] int32, hypotheses that continue
    log_probs: jax.Array  # [B, N] float32
    ended: jax.Array  # [B, N, Q] int32, hypotheses that ended
    ended_scores: jax.Array  # [B, N] float32; hypotheses.LOWEST in empty slots
    state: Any


def search(
    step: Step,
    state: Any,
    batch_size: int,
    special: tokenizers.SpecialTokens,
    max_length: int,
    beams: int = 4,
) -> hypotheses.Translations:
    """Searches for the best sentence with a beam of N prefixes.

    Of all continuations of a sentence's N prefixes the best 2 N are considered. Those
    that end, if they are among the best N, are kept; the best N others continue. At
    `max_length` every hypothesis must end. A sentence is done when N hypotheses have
    ended (fairseq's rule; so N = 1 is greedy search) or when no prefix can reach a
    better score than an ended one has. The search stops when all sentences are done.
    The length that divides a score counts [SEP] and not [CLS].

    Args:
      step: see `Step`.
      state: at [CLS]; leaves begin with an axis [B N], N copies of a sentence.
      max_length: Q, [CLS] and [SEP] included.
      beams: N; 4 in section 4.2.
    """
    rules = _Rules(special, max_length, beams)
    empty = jnp.full((batch_size, beams, max_length), special.pad, jnp.int32)
    start = _Beams(
        jnp.zeros((), jnp.int32),
        empty.at[..., 0].set(special.cls),
        # All prefixes are equal at first: only one continues.
        jnp.full((batch_size, beams), hypotheses.LOWEST).at[:, 0].set(0.0),
        empty,
        jnp.full((batch_size, beams), hypotheses.LOWEST),
        state,
    )
    end = jax.lax.while_loop(
        lambda now: (now.position < max_length - 1) & ~jnp.all(_done(rules, now)),
        functools.partial(_advance, rules, step),
        start,
    )
    return hypotheses.best(end.ended, end.ended_scores)


def _done(rules: _Rules, now: _Beams) -> jax.Array:
    """Returns [B] bool, True for sentences that no prefix can make better."""
    # A longer hypothesis is divided by more, at most by the longest one's penalty.
    largest_penalty = hypotheses.length_penalty(rules.max_length - 1)
    best_possible = jnp.max(now.log_probs, axis=-1) / largest_penalty
    beaten = jnp.max(now.ended_scores, axis=-1) >= best_possible
    return beaten | jnp.all(now.ended_scores > hypotheses.LOWEST, axis=-1)


def _advance(rules: _Rules, step: Step, now: _Beams) -> _Beams:
    """Makes all prefixes a token longer."""
    batch_size, beams, _ = now.ids.shape
    position = now.position + 1
    newest = jax.lax.dynamic_index_in_dim(now.ids, now.position, 2, False)
    logits, state = step(newest.reshape(-1), now.position, now.state)
    log_probs = jax.nn.log_softmax(logits).reshape(batch_size, beams, -1)
    vocab_size = log_probs.shape[-1]
    log_probs = now.log_probs[..., None] + jnp.where(
        _allowed(rules, vocab_size, position), log_probs, hypotheses.LOWEST
    )
    # Twice as many as continue: N of them may end.
    total, index = jax.lax.top_k(log_probs.reshape(batch_size, -1), 2 * beams)
    parents, tokens = index // vocab_size, index % vocab_size
    ids = hypotheses.gather_rows(now.ids, parents).at[:, :, position].set(tokens)
    ends = tokens == rules.special.sep
    ended, ended_scores = _ended(rules, now, position, ids, ends, total)
    alive, kept = jax.lax.top_k(jnp.where(ends, hypotheses.LOWEST, total), beams)
    parents = hypotheses.gather_rows(parents, kept)

    def follow(leaf: jax.Array) -> jax.Array:
        rows = leaf.reshape(batch_size, beams, *leaf.shape[1:])
        return hypotheses.gather_rows(rows, parents).reshape(leaf.shape)

    return _Beams(
        position,
        hypotheses.gather_rows(ids, kept),
        alive,
        ended,
        ended_scores,
        jax.tree.map(follow, state),
    )


def _allowed(rules: _Rules, vocab_size: int, position: jax.Array) -> jax.Array:
    """Returns [1, 1, V] bool, True for the tokens that may stand at a position."""
    token = jnp.arange(vocab_size)[None, None]
    return jnp.where(
        token == rules.special.sep,
        position > 1,
        ~rules.special.contains(token) & (position < rules.max_length - 1),
    )


def _ended(
    rules: _Rules,
    now: _Beams,
    position: jax.Array,
    ids: jax.Array,
    ends: jax.Array,
    total: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Keeps the best N hypotheses that have ended, with those that end now.

    Args:
      now: before this position.
      position: of the newest token.
      ids: [B, 2 N, Q] int32, the best continuations.
      ends: [B, 2 N] bool, True for those that end.
      total: [B, 2 N] float32, their log-probabilities.
    """
    beams = rules.beams
    counts = ends & (jnp.arange(2 * beams) < beams)[None]
    counts &= total > hypotheses.LOWEST / 2
    # A finished sentence stays unchanged, whatever batch it is in.
    counts &= ~_done(rules, now)[:, None]
    scores = jnp.where(
        counts,
        total / hypotheses.length_penalty(position),
        hypotheses.LOWEST,
    )
    ended_scores, kept = jax.lax.top_k(
        jnp.concatenate([now.ended_scores, scores], axis=1), beams
    )
    ended = hypotheses.gather_rows(jnp.concatenate([now.ended, ids], axis=1), kept)
    return ended, ended_scores
