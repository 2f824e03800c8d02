"""Beam search (section 4.2; fairseq's rules).

Jittable, of fixed shapes, and independent of the model, which is an argument.

B sentences, N hypotheses (beams) of a sentence, Q longest target row, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.evaluation import hypotheses

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(tokens [B N] int32, position [] int32, state) -> logits [B N, V] float32 of the next
token, and the next state, whose leaves begin with an axis [B N]."""


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
    alpha: float = hypotheses.LENGTH_PENALTY,
) -> hypotheses.Translations:
    """Searches for the best sentence with a beam of N prefixes.

    Of all continuations of a sentence's N prefixes the best 2 N are considered. Those
    that end, if they are among the best N, are kept; the best N others continue. At
    `max_length` every hypothesis must end. A sentence is done when N hypotheses have
    ended (fairseq's rule; so N = 1 is greedy search) or when no prefix can reach a
    better score than an ended one has. The search stops when all sentences are done.

    Args:
      step: see `Step`.
      state: at [CLS]; leaves begin with an axis [B N], N copies of a sentence.
      batch_size: B.
      special: tokens of the target vocabulary.
      max_length: Q, [CLS] and [SEP] included.
      beams: N; 4 in section 4.2.
      alpha: exponent of the length penalty, which counts [SEP] and not [CLS]; at
        least 0.

    Returns:
      Translations of at least one piece.
    """
    largest_penalty = hypotheses.length_penalty(max_length - 1, alpha)
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

    def done(now: _Beams) -> jax.Array:
        best_possible = jnp.max(now.log_probs, axis=-1) / largest_penalty
        beaten = jnp.max(now.ended_scores, axis=-1) >= best_possible
        return beaten | jnp.all(now.ended_scores > hypotheses.LOWEST, axis=-1)

    def continues(now: _Beams) -> jax.Array:
        return (now.position < max_length - 1) & ~jnp.all(done(now))

    def advance(now: _Beams) -> _Beams:
        position = now.position + 1
        newest = jax.lax.dynamic_index_in_dim(now.ids, now.position, 2, False)
        logits, state = step(newest.reshape(-1), now.position, now.state)
        log_probs = jax.nn.log_softmax(logits).reshape(batch_size, beams, -1)
        vocab_size = log_probs.shape[-1]
        token = jnp.arange(vocab_size)[None, None]
        ends = token == special.sep
        allowed = jnp.where(
            ends, position > 1, ~special.contains(token) & (position < max_length - 1)
        )
        log_probs = now.log_probs[..., None] + jnp.where(
            allowed, log_probs, hypotheses.LOWEST
        )

        total, index = jax.lax.top_k(log_probs.reshape(batch_size, -1), 2 * beams)
        parents, tokens = index // vocab_size, index % vocab_size
        ids = hypotheses.gather_rows(now.ids, parents).at[:, :, position].set(tokens)
        ends = tokens == special.sep

        # A finished sentence stays unchanged, whatever batch it is in.
        counts = (
            ends
            & (jnp.arange(2 * beams) < beams)[None]
            & (total > hypotheses.LOWEST / 2)
        )
        counts &= ~done(now)[:, None]
        scores = jnp.where(
            counts,
            total / hypotheses.length_penalty(position, alpha),
            hypotheses.LOWEST,
        )
        ended_scores, kept = jax.lax.top_k(
            jnp.concatenate([now.ended_scores, scores], axis=1), beams
        )
        ended = hypotheses.gather_rows(jnp.concatenate([now.ended, ids], axis=1), kept)

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

    end = jax.lax.while_loop(continues, advance, start)
    return hypotheses.best(end.ended, end.ended_scores)
