"""Masked language modelling's corruption of its input, jitted (section 3.1).

B batch, L length, M mask capacity: slots for masked positions in a row. Rows with fewer
masked positions leave slots empty; an empty slot's position is L.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data.tokenizers import vocabulary as vocabularies


class Policy(NamedTuple):
    """What stands at a chosen position instead of its token; the rest is kept."""

    mask: float
    random: float


POLICIES = {
    "mask": Policy(1.0, 0.0),  # as the paper's text says
    "electra": Policy(0.85, 0.0),  # ELECTRA's code: 15 % of the chosen keep their token
    "bert": Policy(0.8, 0.1),
}


class Masked(NamedTuple):
    """A batch with its masks.

    input_ids: [B, L] int32, x^mask of section 3.1.
    positions: [B, M] int32, ascending; L in empty slots.
    originals: [B, M] int32, the tokens at `positions`; 0 in empty slots.
    """

    input_ids: jax.Array
    positions: jax.Array
    originals: jax.Array


def capacity(rate: float, max_length: int) -> int:
    """M, the most positions that may be masked in a row: floor((rate + .005) L).

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
    """Masks round(rate * n) of the n tokens of each row, control pieces excepted.

    Positions are uniform over the row, hence over both sides of a pair (TRTD), and
    drawn without replacement. (ELECTRA's code draws with replacement and so masks
    somewhat less than its rate; the paper's text does not say.)

    Args:
      rng: key.
      input_ids: [B, L] int32.
      rate: share of tokens to mask; 0.15 in ELECTRA; the paper states none.
      policy: what to put there.
      vocab_size: V, for random tokens.

    Returns:
      Masked.
    """
    length = input_ids.shape[-1]
    slots = capacity(rate, length)
    order_rng, policy_rng, random_rng = jax.random.split(rng, 3)

    maskable = input_ids >= vocabularies.NUM_CONTROL
    tokens = jnp.sum(input_ids != vocabularies.PAD, axis=-1)
    wanted = jnp.clip(jnp.round(rate * tokens).astype(jnp.int32), 1, slots)
    wanted = jnp.minimum(wanted, jnp.sum(maskable, axis=-1))

    order = jax.random.uniform(order_rng, input_ids.shape)
    _, chosen = jax.lax.top_k(jnp.where(maskable, order, -1.0), slots)
    chosen = jnp.where(jnp.arange(slots) < wanted[:, None], chosen, length)
    positions = jnp.sort(chosen, axis=-1).astype(jnp.int32)
    originals = gather(input_ids, positions)

    dice = jax.random.uniform(policy_rng, positions.shape)
    noise = jax.random.randint(
        random_rng, positions.shape, vocabularies.NUM_CONTROL, vocab_size
    )
    written = jnp.where(dice < policy.mask + policy.random, noise, originals)
    written = jnp.where(dice < policy.mask, vocabularies.MASK, written)
    return Masked(scatter(input_ids, positions, written), positions, originals)


def gather(values: jax.Array, positions: jax.Array) -> jax.Array:
    """values [B, L, ...] at positions [B, M] -> [B, M, ...]; 0 in empty slots."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(
        values, positions
    )


def scatter(values: jax.Array, positions: jax.Array, written: jax.Array) -> jax.Array:
    """Writes `written` [B, M] over values [B, L]; empty slots write nothing."""
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
        values, positions, written
    )


def mark(positions: jax.Array, length: int) -> jax.Array:
    """Positions [B, M] -> [B, L] bool, true where masked."""
    marks = jnp.zeros((positions.shape[0], length), bool)
    return scatter(marks, positions, jnp.ones(positions.shape, bool))


def find(marks: jax.Array, slots: int) -> jax.Array:
    """The inverse of `mark`: [B, L] bool -> [B, M] int32, L in empty slots."""
    length = marks.shape[-1]
    places = jnp.where(marks, jnp.arange(length, dtype=jnp.int32), length)
    return jnp.sort(places, axis=-1)[:, :slots]
