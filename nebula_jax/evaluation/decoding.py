"""Decoding: beam search, and mask-predict, by length-normalized scores (section 4.2).

Beam search has fairseq's rules; mask-predict is Ghazvininejad et al.'s (2019), as in
ABNet's code. Both are jittable, of fixed shapes, and independent of the model, which is
an argument.

B sentences, N hypotheses (beams, or length candidates) of a sentence, K of them chosen,
Q longest target row, V vocabulary, T lengths that have a logit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers

LENGTH_PENALTY = 1.1  # exponent of GNMT's penalty; ABNet's code
LOWEST = -1e9  # below every log-probability of a hypothesis; finite, so it adds

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(tokens [B N] int32, position [] int32, state) -> logits [B N, V] float32 of the next
token, and the next state, whose leaves begin with an axis [B N]."""
Predict = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(input_ids [B, N, Q], wanted [B, N, Q] bool) -> best pieces [B, N, Q] int32 and their
log-probabilities [B, N, Q] float32; arbitrary where not wanted."""

SHORTEST = 3  # length of a row: [CLS], a piece, [SEP]. (ABNet's, without [CLS], is 2.)


class Translations(NamedTuple):
    """The best hypothesis of every sentence."""

    ids: jax.Array  # [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded
    scores: jax.Array  # [B] float32, log-probability over length penalty


def length_penalty(length: jax.Array | int) -> jax.Array | float:
    """Returns ((5 + length) / 6)^LENGTH_PENALTY, which divides a log-probability."""
    return ((5.0 + length) / 6.0) ** LENGTH_PENALTY


def gather_rows(values: jax.Array, index: jax.Array) -> jax.Array:
    """Reorders hypotheses: values [B, N, ...] at index [B, K] -> [B, K, ...]."""
    return jax.vmap(lambda rows, at: rows[at])(values, index)


def best(ids: jax.Array, scores: jax.Array) -> Translations:
    """Selects of ids [B, N, Q] int32 those of the highest score, [B, N] float32."""
    index = jnp.argmax(scores, axis=-1)[:, None]
    return Translations(gather_rows(ids, index)[:, 0], gather_rows(scores, index)[:, 0])


class _Rules(NamedTuple):
    """The arguments of `beam_search` that its functions share."""

    special: tokenizers.SpecialTokens
    max_length: int
    beams: int


class _Beams(NamedTuple):
    position: jax.Array  # [] int32, of the newest token
    ids: jax.Array  # [B, N, Q] int32, hypotheses that continue
    log_probs: jax.Array  # [B, N] float32
    ended: jax.Array  # [B, N, Q] int32, hypotheses that ended
    ended_scores: jax.Array  # [B, N] float32; LOWEST in empty slots
    state: Any


def beam_search(
    step: Step,
    state: Any,
    batch_size: int,
    special: tokenizers.SpecialTokens,
    max_length: int,
    beams: int = 4,
) -> Translations:
    """Searches for the best sentence with a beam of N prefixes.

    Of all continuations of a sentence's N prefixes the best 2 N are considered. Those
    that end, if they are among the best N, are kept; the best N others continue. At
    `max_length` every hypothesis must end. A sentence is done when N hypotheses have
    ended (fairseq's rule; so N = 1 is greedy search) or when no prefix can reach a
    better score than an ended one has. The search stops when all sentences are done.
    The length that divides a score counts [SEP] and not [CLS].

    `state` is at [CLS]; leaves begin with an axis [B N], N copies of a sentence. N is 4
    in section 4.2; Q, `max_length`, counts [CLS] and [SEP].
    """
    rules = _Rules(special, max_length, beams)
    empty = jnp.full((batch_size, beams, max_length), special.pad, jnp.int32)
    start = _Beams(
        jnp.zeros((), jnp.int32),
        empty.at[..., 0].set(special.cls),
        # All prefixes are equal at first: only one continues.
        jnp.full((batch_size, beams), LOWEST).at[:, 0].set(0.0),
        empty,
        jnp.full((batch_size, beams), LOWEST),
        state,
    )
    end = jax.lax.while_loop(
        lambda now: (now.position < max_length - 1) & ~jnp.all(_done(rules, now)),
        functools.partial(_advance, rules, step),
        start,
    )
    return best(end.ended, end.ended_scores)


def _done(rules: _Rules, now: _Beams) -> jax.Array:
    """Returns [B] bool, True for sentences that no prefix can make better."""
    # A longer hypothesis is divided by more, at most by the longest one's penalty.
    largest_penalty = length_penalty(rules.max_length - 1)
    best_possible = jnp.max(now.log_probs, axis=-1) / largest_penalty
    beaten = jnp.max(now.ended_scores, axis=-1) >= best_possible
    return beaten | jnp.all(now.ended_scores > LOWEST, axis=-1)


def _advance(rules: _Rules, step: Step, now: _Beams) -> _Beams:
    """Makes all prefixes a token longer."""
    batch_size, beams, _ = now.ids.shape
    position = now.position + 1
    newest = jax.lax.dynamic_index_in_dim(now.ids, now.position, 2, False)
    logits, state = step(newest.reshape(-1), now.position, now.state)
    log_probs = jax.nn.log_softmax(logits).reshape(batch_size, beams, -1)
    vocab_size = log_probs.shape[-1]
    log_probs = now.log_probs[..., None] + jnp.where(
        _allowed(rules, vocab_size, position), log_probs, LOWEST
    )
    # Twice as many as continue: N of them may end.
    total, index = jax.lax.top_k(log_probs.reshape(batch_size, -1), 2 * beams)
    parents, tokens = index // vocab_size, index % vocab_size
    ids = gather_rows(now.ids, parents).at[:, :, position].set(tokens)
    ends = tokens == rules.special.sep
    ended, ended_scores = _ended(rules, now, position, ids, ends, total)
    alive, kept = jax.lax.top_k(jnp.where(ends, LOWEST, total), beams)
    parents = gather_rows(parents, kept)

    def follow(leaf: jax.Array) -> jax.Array:
        rows = leaf.reshape(batch_size, beams, *leaf.shape[1:])
        return gather_rows(rows, parents).reshape(leaf.shape)

    return _Beams(
        position,
        gather_rows(ids, kept),
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

    `now` is before `position`. Of the best continuations, ids are [B, 2 N, Q] int32,
    `ends` [B, 2 N] bool, and their log-probabilities `total` [B, 2 N] float32.
    """
    beams = rules.beams
    counts = ends & (jnp.arange(2 * beams) < beams)[None]
    counts &= total > LOWEST / 2
    # A finished sentence stays unchanged, whatever batch it is in.
    counts &= ~_done(rules, now)[:, None]
    scores = jnp.where(counts, total / length_penalty(position), LOWEST)
    ended_scores, kept = jax.lax.top_k(
        jnp.concatenate([now.ended_scores, scores], axis=1), beams
    )
    ended = gather_rows(jnp.concatenate([now.ended, ids], axis=1), kept)
    return ended, ended_scores


def length_candidates(length_logits: jax.Array, candidates: int) -> jax.Array:
    """Selects the likeliest lengths of logits [B, T] float32: [B, N] int32, best first.

    (The paper's "beam_sizes = 4" is ABNet's number of length candidates with the
    masked objective.)
    """
    allowed = jnp.arange(length_logits.shape[-1])[None] >= SHORTEST
    _, lengths = jax.lax.top_k(jnp.where(allowed, length_logits, -jnp.inf), candidates)
    return jnp.maximum(lengths, SHORTEST).astype(jnp.int32)


def mask_predict(
    predict: Predict,
    lengths: jax.Array,
    special: tokenizers.SpecialTokens,
    max_length: int,
    iterations: int = 10,
) -> Translations:
    """Predicts all pieces at once, then the least certain ones again and again.

    After pass 0, in which all n pieces are masked, pass i = 1 ... I masks the
    max(1, floor(n (1 - i / I))) of lowest probability and predicts these; the others
    stay. So there are I + 1 passes (ABNet's code). Returned is the best of the N
    hypotheses of each sentence, by Σ log p over length penalty. `lengths` [B, N] int32
    are of target rows, special tokens included, and are cut to Q, `max_length`.
    """
    lengths = jnp.minimum(lengths, max_length)
    place = jnp.arange(max_length)[None, None]
    last = lengths[..., None] - 1
    pieces = (place > 0) & (place < last)
    count = jnp.sum(pieces, axis=-1, keepdims=True)
    template = jnp.where(pieces, special.mask, special.pad)
    template = jnp.where(place == 0, special.cls, template)
    template = jnp.where(place == last, special.sep, template).astype(jnp.int32)

    def predict_again(
        ids: jax.Array, log_probs: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        masked = jnp.where(wanted, special.mask, ids)
        new, new_log_probs = predict(masked, wanted)
        return jnp.where(wanted, new, ids), jnp.where(wanted, new_log_probs, log_probs)

    def iterate(
        i: jax.Array, filled: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        ids, log_probs = filled
        wanted = jnp.maximum(1, count * (iterations - i) // iterations)
        doubtful = jnp.where(pieces, log_probs, jnp.inf)
        rank = jnp.argsort(jnp.argsort(doubtful, axis=-1), axis=-1)
        return predict_again(ids, log_probs, pieces & (rank < wanted))

    filled = predict_again(template, jnp.zeros(template.shape), pieces)
    ids, log_probs = jax.lax.fori_loop(1, iterations + 1, iterate, filled)

    penalty = length_penalty(lengths - 1)
    return best(ids, jnp.sum(log_probs, axis=-1) / penalty)
