"""Corruption of training inputs: masked language modeling, and ABNet's two sides.

Jittable. M3 masks packed text (`mask_tokens`, section 3.1), and so does BERT
(`mask_rows`); ABNet masks the target sentence (`mask_random_count`) and may corrupt a
span of the source (`corrupt_span`). BERT's and ABNet's functions take a key for each
example, so that an example is corrupted alike in whatever batch it stands.

B batch, L length, Q target length, V vocabulary, M mask capacity: slots for masked
positions in a row (see `models.mask_slots`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots


class Policy(NamedTuple):
    """The shares of chosen positions that become [MASK] or random; others stay."""

    mask: float
    random: float


POLICIES = {
    "mask": Policy(1.0, 0.0),  # the paper's text
    "electra": Policy(0.85, 0.0),  # ELECTRA's code: 15 % of the chosen keep their token
    "bert": Policy(0.8, 0.1),
}
BERT = POLICIES["bert"]


def example_keys(key: jax.Array, example_ids: jax.Array) -> jax.Array:
    """Derives keys [B] of examples [B] int32 or uint32, whatever batch they are in."""
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(example_ids)


class Masked(NamedTuple):
    """A batch with its masks."""

    input_ids: jax.Array  # [B, L] int32, x^mask of section 3.1
    positions: jax.Array  # [B, M] int32, ascending; L in empty slots
    originals: jax.Array  # [B, M] int32, the tokens at `positions`; 0 in empty slots


def capacity(rate: float, max_length: int) -> int:
    """Computes M, the most positions masked in a row: floor((rate + .005) L).

    ELECTRA's formula: 19 of 128 and 79 of 512 at 15 %.
    """
    return max(1, int((rate + 0.005) * max_length))


def mask_tokens(
    rng: jax.Array,
    input_ids: jax.Array,
    *,
    rate: float,
    policy: Policy,
    vocab_size: int,
) -> Masked:
    """Masks round(rate * n) of the n tokens of each row, but no special token.

    At most `capacity` are masked, of full rows of few tokens one less: 9 of 64 at 15 %.
    Positions are uniform over the row, hence over both sides of a pair (TRTD), and
    drawn without replacement. (ELECTRA's code draws with replacement and so masks
    somewhat less than its rate; the paper leaves it open.) Text [B, L] int32 is of a
    vocabulary whose special tokens come first; the rate is 0.15 in ELECTRA, the paper
    states none.
    """
    length = input_ids.shape[-1]
    slots = capacity(rate, length)
    order_rng, policy_rng, random_rng = jax.random.split(rng, 3)

    maskable = input_ids >= vocabularies.NUM_SPECIAL
    tokens = jnp.sum(input_ids != vocabularies.SPECIAL.pad, axis=-1)
    wanted = jnp.clip(jnp.round(rate * tokens).astype(jnp.int32), 1, slots)
    wanted = jnp.minimum(wanted, jnp.sum(maskable, axis=-1))

    order = jax.random.uniform(order_rng, input_ids.shape)
    # Not top_k, for which every device would be sent the rows of all the others.
    chosen = jnp.argsort(jnp.where(maskable, -order, 1.0), axis=-1)[:, :slots]
    chosen = jnp.where(jnp.arange(slots)[None] < wanted[:, None], chosen, length)
    positions = jnp.sort(chosen, axis=-1).astype(jnp.int32)
    originals = mask_slots.gather(input_ids, positions)

    dice = jax.random.uniform(policy_rng, positions.shape)
    noise = jax.random.randint(
        random_rng, positions.shape, vocabularies.NUM_SPECIAL, vocab_size
    )
    written = jnp.where(dice < policy.mask + policy.random, noise, originals)
    written = jnp.where(dice < policy.mask, vocabularies.SPECIAL.mask, written)
    masked_ids = mask_slots.scatter(input_ids, positions, written)
    return Masked(masked_ids, positions, originals)


def mask_rows(
    keys: jax.Array,
    input_ids: jax.Array,
    *,
    rate: float,
    policy: Policy,
    vocab_size: int,
) -> Masked:
    """Masks as `mask_tokens`, each row from its key of [B].

    So a row is masked alike in whatever part of a batch it stands.
    """

    def mask(key: jax.Array, row: jax.Array) -> Masked:
        masked = mask_tokens(
            key, row[None], rate=rate, policy=policy, vocab_size=vocab_size
        )
        return jax.tree.map(lambda leaf: leaf[0], masked)

    return jax.vmap(mask)(keys, input_ids)


def mask_random_count(
    keys: jax.Array,
    target_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    policy: Policy = BERT,
) -> tuple[jax.Array, jax.Array]:
    """Masks m of a row's n pieces, m ~ U{1..n}: the conditional masked language model.

    The m pieces are drawn uniformly and without replacement. Unlike in ABNet's code
    [SEP] is never chosen: its place follows from the length, which decoding is given.
    Of a key for each example, [B], and targets [B, Q] int32, [CLS] y_1 ... y_n [SEP],
    padded; returns them corrupted, and [B, Q] bool, true where a piece was chosen.
    """

    def corrupt(key: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        number_key, order_key, noise_key = jax.random.split(key, 3)
        pieces = _pieces(row, special)
        chosen_count = jax.random.randint(
            number_key, (), 1, jnp.maximum(2, jnp.sum(pieces) + 1)
        )
        order = jnp.where(pieces, jax.random.uniform(order_key, row.shape), 2.0)
        rank = jnp.argsort(jnp.argsort(order))
        chosen = pieces & (rank < chosen_count)
        return _replace(noise_key, row, chosen, special, policy), chosen

    return jax.vmap(corrupt)(keys, target_ids)


def corrupt_span(
    keys: jax.Array,
    source_ids: jax.Array,
    special: tokenizers.SpecialTokens,
    rate: float = 0.1,
    policy: Policy = BERT,
) -> jax.Array:
    """Corrupts a span of each source sentence, as ABNet's code does.

    (Its paper and this one do not mention it.) The span has max(1, round(rate n)) + 1
    of the n pieces: with probability 0.2 the first, with 0.2 the last, else anywhere.
    Of a key for each example, [B], and padded text [B, L] int32, as is the result.
    """

    def corrupt(key: jax.Array, row: jax.Array) -> jax.Array:
        side_key, start_key, noise_key = jax.random.split(key, 3)
        pieces = _pieces(row, special)
        count = jnp.sum(pieces)
        wanted = jnp.maximum(1, jnp.round(rate * count).astype(jnp.int32)) + 1
        last = jnp.maximum(0, count - wanted)
        side = jax.random.uniform(side_key)
        start = jax.random.randint(start_key, (), 0, last + 1)
        start = jnp.where(side < 0.2, 0, jnp.where(side < 0.4, last, start))
        index = jnp.cumsum(pieces) - 1  # of the pieces, special tokens left out
        chosen = pieces & (index >= start) & (index < start + wanted)
        return _replace(noise_key, row, chosen, special, policy)

    return jax.vmap(corrupt)(keys, source_ids)


def _pieces(ids: jax.Array, special: tokenizers.SpecialTokens) -> jax.Array:
    """Marks text: no padding, no [CLS], no [SEP]."""
    return (ids != special.pad) & (ids != special.cls) & (ids != special.sep)


def _replace(
    key: jax.Array,
    row: jax.Array,
    chosen: jax.Array,
    special: tokenizers.SpecialTokens,
    policy: Policy,
) -> jax.Array:
    """Writes [MASK], a random piece or nothing at each chosen place of a row [L]."""
    dice_key, piece_key = jax.random.split(key)
    dice = jax.random.uniform(dice_key, row.shape)
    noise = jax.random.randint(piece_key, row.shape, 0, special.size)
    noise = jnp.where(special.contains(noise), special.mask, noise)
    written = jnp.where(dice < policy.mask + policy.random, noise, row)
    written = jnp.where(dice < policy.mask, special.mask, written)
    return jnp.where(chosen, written, row).astype(row.dtype)
