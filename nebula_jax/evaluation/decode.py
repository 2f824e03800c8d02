"""Mask-predict and beam search (section 4.2; Ghazvininejad et al. 2019, ABNet's code).

Both are jittable, of fixed shapes, and know no model: `mask_predict` asks for the best
piece at marked places, `beam_search` for the logits of the next piece. `translate_cmlm`
and `translate_ar` put ABNet's target side in.

B sentences, N hypotheses of a sentence, Q longest target row, V vocabulary, L source
length, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.models import abnet, mask_slots, transformer

LENGTH_PENALTY = 1.1  # ABNet's code
LOWEST = -1e9  # a log-probability that no hypothesis comes near; finite, so it adds
CHUNK = 512  # places whose logits are in memory at once: 60 MB of 30,522 pieces

Predict = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(input_ids [B, N, Q], wanted [B, N, Q] bool) -> best pieces [B, N, Q] int32 and their
log-probabilities [B, N, Q] float32; anything where not wanted."""

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(tokens [B N] int32, position [] int32, state) -> logits [B N, V] float32 of the next
token, and the next state, whose leaves begin with an axis [B N]."""


class Translations(NamedTuple):
    """The best hypothesis of every sentence.

    ids: [B, Q] int32, [CLS] y_1 ... y_n [SEP], padded.
    scores: [B] float32, log-probability over length penalty.
    """

    ids: jax.Array
    scores: jax.Array


def penalty(length: jax.Array, alpha: float) -> jax.Array:
    """((5 + length) / 6)^alpha, what a log-probability is divided by (GNMT)."""
    return ((5.0 + length) / 6.0) ** alpha


def length_candidates(
    length_logits: jax.Array, candidates: int = 4, shortest: int = 3
) -> jax.Array:
    """The likeliest lengths.

    (The paper's "beam_sizes = 4" is ABNet's number of length candidates, where the
    objective is the masked one.)

    Args:
      length_logits: [B, T] float32.
      candidates: N.
      shortest: [CLS], a piece and [SEP]; ABNet's code, which has no [CLS], says 2.

    Returns:
      [B, N] int32, likeliest first.
    """
    allowed = jnp.arange(length_logits.shape[-1]) >= shortest
    _, best = jax.lax.top_k(jnp.where(allowed, length_logits, -jnp.inf), candidates)
    return jnp.maximum(best, shortest).astype(jnp.int32)


def mask_predict(
    predict: Predict,
    lengths: jax.Array,
    controls: tokenizers.SpecialTokens,
    max_length: int,
    iterations: int = 10,
    alpha: float = LENGTH_PENALTY,
) -> Translations:
    """Predicts all pieces at once, then the least certain ones again and again.

    After pass 0, in which all n pieces are masked, pass i = 1 ... I masks the
    max(1, floor(n (1 - i / I))) of lowest probability and predicts these; the others
    keep theirs. So there are I + 1 passes (ABNet's code).

    Args:
      predict: see `Predict`.
      lengths: [B, N] int32, of target rows, control pieces included.
      controls: of the target vocabulary.
      max_length: Q; longer lengths are cut to it.
      iterations: I.
      alpha: of the length penalty.

    Returns:
      Of the N hypotheses of each sentence the best, by Σ log p over length penalty.
    """
    lengths = jnp.minimum(lengths, max_length)
    place = jnp.arange(max_length)
    last = lengths[..., None] - 1
    pieces = (place > 0) & (place < last)
    count = jnp.sum(pieces, axis=-1, keepdims=True)
    template = jnp.where(pieces, controls.mask, controls.pad)
    template = jnp.where(place == 0, controls.cls, template)
    template = jnp.where(place == last, controls.sep, template).astype(jnp.int32)

    def predict_again(ids, log_probs, wanted):
        masked = jnp.where(wanted, controls.mask, ids)
        best, best_log_probs = predict(masked, wanted)
        return (
            jnp.where(wanted, best, ids),
            jnp.where(wanted, best_log_probs, log_probs),
        )

    def iterate(i, filled):
        ids, log_probs = filled
        wanted = jnp.maximum(1, count * (iterations - i) // iterations)
        doubtful = jnp.where(pieces, log_probs, jnp.inf)
        rank = jnp.argsort(jnp.argsort(doubtful, axis=-1), axis=-1)
        return predict_again(ids, log_probs, pieces & (rank < wanted))

    filled = predict_again(template, jnp.zeros(template.shape), pieces)
    ids, log_probs = jax.lax.fori_loop(1, iterations + 1, iterate, filled)

    scores = jnp.sum(log_probs, axis=-1) / penalty(lengths - 1, alpha)
    return _best(ids, scores)


class _Beams(NamedTuple):
    position: jax.Array  # [] int32, of the newest token
    ids: jax.Array  # [B, N, Q] int32, hypotheses that go on
    log_probs: jax.Array  # [B, N] float32
    ended: jax.Array  # [B, N, Q] int32, hypotheses that ended
    ended_scores: jax.Array  # [B, N] float32; LOWEST where there is none
    state: Any


def beam_search(
    step: Step,
    state: Any,
    batch_size: int,
    controls: tokenizers.SpecialTokens,
    max_length: int,
    beams: int = 4,
    alpha: float = LENGTH_PENALTY,
) -> Translations:
    """The best of the sentences that a beam of prefixes leads to.

    Of all continuations of a sentence's N prefixes the best 2 N are looked at. Those
    that end, if they are among the best N, are kept; the best N others go on. At
    `max_length` every hypothesis must end. A sentence is done when N hypotheses have
    ended (fairseq's rule; so N = 1 is greedy search) or when no prefix can come to a
    better score than an ended one has. The search stops when all sentences are done.

    Args:
      step: see `Step`.
      state: before [CLS]; leaves begin with an axis [B N], N copies of a sentence.
      batch_size: B.
      controls: of the target vocabulary.
      max_length: Q, [CLS] and [SEP] included.
      beams: N; 4 in section 4.2.
      alpha: of the length penalty, which counts [SEP] and not [CLS]; 0 or more.

    Returns:
      Translations of one piece at least.
    """
    most_divided_by = penalty(max_length - 1, alpha)
    empty = jnp.full((batch_size, beams, max_length), controls.pad, jnp.int32)
    start = _Beams(
        jnp.zeros((), jnp.int32),
        empty.at[..., 0].set(controls.cls),
        # All prefixes are equal at first: only one goes on.
        jnp.full((batch_size, beams), LOWEST).at[:, 0].set(0.0),
        empty,
        jnp.full((batch_size, beams), LOWEST),
        state,
    )

    def done(now: _Beams):
        best_possible = jnp.max(now.log_probs, axis=-1) / most_divided_by
        beaten = jnp.max(now.ended_scores, axis=-1) >= best_possible
        return beaten | jnp.all(now.ended_scores > LOWEST, axis=-1)

    def goes_on(now: _Beams):
        return (now.position < max_length - 1) & ~jnp.all(done(now))

    def advance(now: _Beams) -> _Beams:
        position = now.position + 1
        newest = jax.lax.dynamic_index_in_dim(now.ids, now.position, 2, False)
        logits, state = step(newest.reshape(-1), now.position, now.state)
        log_probs = jax.nn.log_softmax(logits).reshape(batch_size, beams, -1)
        vocab_size = log_probs.shape[-1]
        token = jnp.arange(vocab_size)
        ends = token == controls.sep
        allowed = jnp.where(
            ends, position > 1, ~controls.contains(token) & (position < max_length - 1)
        )
        log_probs = now.log_probs[..., None] + jnp.where(allowed, log_probs, LOWEST)

        total, index = jax.lax.top_k(log_probs.reshape(batch_size, -1), 2 * beams)
        parents, tokens = index // vocab_size, index % vocab_size
        ids = _rows(now.ids, parents).at[:, :, position].set(tokens)
        ends = tokens == controls.sep

        # A sentence that is done stays as it is, whatever batch it stands in.
        counts = ends & (jnp.arange(2 * beams) < beams) & (total > LOWEST / 2)
        counts &= ~done(now)[:, None]
        scores = jnp.where(counts, total / penalty(position, alpha), LOWEST)
        ended_scores, kept = jax.lax.top_k(
            jnp.concatenate([now.ended_scores, scores], axis=1), beams
        )
        ended = _rows(jnp.concatenate([now.ended, ids], axis=1), kept)

        alive, kept = jax.lax.top_k(jnp.where(ends, LOWEST, total), beams)
        parents = _rows(parents, kept)

        def follow(leaf):
            own = leaf.reshape(batch_size, beams, *leaf.shape[1:])
            return _rows(own, parents).reshape(leaf.shape)

        return _Beams(
            position,
            _rows(ids, kept),
            alive,
            ended,
            ended_scores,
            jax.tree.map(follow, state),
        )

    end = jax.lax.while_loop(goes_on, advance, start)
    return _best(end.ended, end.ended_scores)


def _rows(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B, N, ...] at index [B, K] -> [B, K, ...]."""
    return jax.vmap(lambda own, at: own[at])(values, index)


def _best(ids: jax.Array, scores: jax.Array) -> Translations:
    best = jnp.argmax(scores, axis=-1)[:, None]
    return Translations(_rows(ids, best)[:, 0], _rows(scores, best)[:, 0])


def translate_cmlm(
    config: abnet.Config,
    params: abnet.Params,
    encoded: abnet.Encoded,
    source_mask: jax.Array,
    controls: tokenizers.SpecialTokens,
    candidates: int = 4,
    iterations: int = 10,
    max_length: int | None = None,
) -> Translations:
    """Mask-predict with ABNet's target side. Jit it with the other arguments static.

    Args:
      config: of the translator.
      params: of the Target.
      encoded: what S sent.
      source_mask: [B, L] bool, false at padding.
      controls: of the target vocabulary.
      candidates: lengths that are tried.
      iterations: after pass 0.
      max_length: Q; the configuration's if None. Less is faster, if no candidate is
        longer.

    Returns:
      Translations.
    """
    target = abnet.Target(config)
    variables = {"params": params}
    memory = target.apply(variables, encoded.hidden, method="read")

    def predict(input_ids, wanted):
        rows = input_ids.reshape(-1, input_ids.shape[-1])
        hidden = target.apply(
            variables, rows, rows != controls.pad, memory, source_mask, method="hidden"
        )
        best, log_probs = best_pieces(
            config,
            params,
            hidden.reshape(-1, hidden.shape[-1]),
            wanted.reshape(-1),
            controls,
        )
        return best.reshape(wanted.shape), log_probs.reshape(wanted.shape)

    return mask_predict(
        predict,
        length_candidates(encoded.length_logits, candidates),
        controls,
        max_length or config.max_target_length,
        iterations,
    )


def best_pieces(
    config: abnet.Config,
    params: abnet.Params,
    hidden: jax.Array,
    wanted: jax.Array,
    controls: tokenizers.SpecialTokens,
) -> tuple[jax.Array, jax.Array]:
    """The likeliest piece at each wanted place; logits are made for these alone.

    Args:
      config: of the translator.
      params: of the Target.
      hidden: [R, D] float32, places of all rows.
      wanted: [R] bool.
      controls: of the target vocabulary; none of them is ever the best.

    Returns:
      [R] int32 and their log-probabilities [R] float32; 0 where not wanted.
    """
    places = len(wanted)
    chunk = min(CHUNK, places)
    positions = mask_slots.find(wanted[None], places)[0]
    positions = jnp.pad(positions, (0, chunk), constant_values=places)
    count = jnp.sum(wanted)

    def more(carry):
        start, best, log_probs = carry
        at = jax.lax.dynamic_slice_in_dim(positions, start, chunk)
        logits = abnet.Target(config).apply(
            {"params": params}, mask_slots.gather_positions(hidden, at), method="logits"
        )
        control = controls.contains(jnp.arange(logits.shape[-1]))
        choice = jnp.argmax(jnp.where(control, LOWEST, logits), axis=-1)
        own = jnp.take_along_axis(logits, choice[:, None], axis=-1)[:, 0]
        own = own - jax.nn.logsumexp(logits, axis=-1)
        return (
            start + chunk,
            best.at[at].set(choice.astype(jnp.int32), mode="drop"),
            log_probs.at[at].set(own, mode="drop"),
        )

    start = (0, jnp.zeros(places, jnp.int32), jnp.zeros(places))
    return jax.lax.while_loop(lambda carry: carry[0] < count, more, start)[1:]


def translate_ar(
    config: abnet.Config,
    params: abnet.Params,
    encoded: abnet.Encoded,
    source_mask: jax.Array,
    controls: tokenizers.SpecialTokens,
    beams: int = 4,
    alpha: float = LENGTH_PENALTY,
    max_length: int | None = None,
) -> Translations:
    """Beam search with ABNet's target side. Jit it with the other arguments static.

    Args:
      config: of the translator.
      params: of the Target.
      encoded: what S sent.
      source_mask: [B, L] bool, false at padding.
      controls: of the target vocabulary.
      beams: N.
      alpha: of the length penalty.
      max_length: Q; the configuration's if None.

    Returns:
      Translations.
    """
    target = abnet.Target(config)
    variables = {"params": params}
    memory = target.apply(variables, encoded.hidden, method="read")
    batch_size = len(source_mask)
    max_length = max_length or config.max_target_length

    def step(tokens, position, cache):
        return target.apply(
            variables, tokens, position, cache, memory, source_mask, method="step"
        )

    return beam_search(
        step,
        transformer.empty_cache(config.target, batch_size * beams, max_length),
        batch_size,
        controls,
        max_length,
        beams,
        alpha,
    )
