"""Translation with ABNet's target side, by mask-predict or beam search (section 4.2).

B sentences, N hypotheses of a sentence, Q longest target row, R places of all rows,
V vocabulary, L source length, D width.
"""

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.evaluation import decoding
from nebula_jax.models import abnet, mask_slots, transformer

CHUNK = 512  # places whose logits are in memory at once: 60 MB of 30,522 pieces


def by_mask_predict(
    config: abnet.Config,
    params: abnet.Params,
    encoded: abnet.Encoded,
    source_mask: jax.Array,
    special: tokenizers.SpecialTokens,
    candidates: int = 4,
    iterations: int = 10,
) -> decoding.Translations:
    """Translates by mask-predict. Jit it with all but the arrays static.

    `encoded` is what S sent, with length logits, as it does with `cmlm`; `source_mask`
    [B, L] bool is false at padding. N lengths are tried, in `iterations` + 1 passes.
    """
    assert encoded.length_logits is not None
    target = abnet.Target(config)
    variables = {"params": params}
    memory = target.apply(variables, encoded.hidden, method="read")

    def predict(input_ids: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = input_ids.reshape(-1, input_ids.shape[-1])
        hidden = target.apply(
            variables, rows, rows != special.pad, memory, source_mask, method="hidden"
        )
        best, log_probs = best_pieces(
            config,
            params,
            hidden.reshape(-1, hidden.shape[-1]),
            wanted.reshape(-1),
            special,
        )
        return best.reshape(wanted.shape), log_probs.reshape(wanted.shape)

    return decoding.mask_predict(
        predict,
        decoding.length_candidates(encoded.length_logits, candidates),
        special,
        config.max_target_length,
        iterations,
    )


def best_pieces(
    config: abnet.Config,
    params: abnet.Params,
    hidden: jax.Array,
    wanted: jax.Array,
    special: tokenizers.SpecialTokens,
) -> tuple[jax.Array, jax.Array]:
    """Finds the likeliest piece at each wanted place [R] bool; only these get logits.

    Special tokens are never predicted. `hidden` is [R, D] float32, of all rows. Returns
    pieces [R] int32 and their log-probabilities [R] float32; 0 where not wanted.
    """
    places = len(wanted)
    chunk = min(CHUNK, places)
    positions = mask_slots.find(wanted[None], places)[0]
    positions = jnp.pad(positions, (0, chunk), constant_values=places)
    count = jnp.sum(wanted)

    def next_chunk(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        start, best, log_probs = carry
        at = jax.lax.dynamic_slice_in_dim(positions, start, chunk)
        logits = abnet.Target(config).apply(
            {"params": params}, mask_slots.gather_positions(hidden, at), method="logits"
        )
        is_special = special.contains(jnp.arange(logits.shape[-1]))[None]
        choice = jnp.argmax(jnp.where(is_special, decoding.LOWEST, logits), axis=-1)
        chosen = jnp.take_along_axis(logits, choice[:, None], axis=-1)[:, 0]
        chosen = chosen - jax.nn.logsumexp(logits, axis=-1)
        return (
            start + chunk,
            best.at[at].set(choice.astype(jnp.int32), mode="drop"),
            log_probs.at[at].set(chosen, mode="drop"),
        )

    start = (jnp.zeros((), jnp.int32), jnp.zeros(places, jnp.int32), jnp.zeros(places))
    _, best, log_probs = jax.lax.while_loop(
        lambda carry: carry[0] < count, next_chunk, start
    )
    return best, log_probs


def by_beam_search(
    config: abnet.Config,
    params: abnet.Params,
    encoded: abnet.Encoded,
    source_mask: jax.Array,
    special: tokenizers.SpecialTokens,
    beams: int = 4,
) -> decoding.Translations:
    """Translates by beam search. Jit it with all but the arrays static.

    `encoded` is what S sent; `source_mask` [B, L] bool is false at padding.
    """
    target = abnet.Target(config)
    variables = {"params": params}
    memory = target.apply(variables, encoded.hidden, method="read")
    batch_size, max_length = len(source_mask), config.max_target_length

    def step(
        tokens: jax.Array, position: jax.Array, cache: tuple[transformer.KeyValues, ...]
    ) -> tuple[jax.Array, tuple[transformer.KeyValues, ...]]:
        return target.apply(
            variables, tokens, position, cache, memory, source_mask, method="step"
        )

    return decoding.beam_search(
        step,
        transformer.empty_cache(config.target, batch_size * beams, max_length),
        batch_size,
        special,
        max_length,
        beams,
    )
