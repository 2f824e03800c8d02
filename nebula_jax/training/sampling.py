"""A sample of a distribution over a vocabulary, for one random number each.

`jax.random.categorical` draws one for every piece of the vocabulary and takes two
logarithms of it: on a CPU a sixth of a generator's step. Here one number is looked up
in the cumulative distribution, first among blocks of about sqrt(V) pieces, then in
the block.

V vocabulary, C pieces of a block, N blocks.
"""

import math

import jax
import jax.numpy as jnp

_JUST_BELOW_ONE = 1.0 - 2.0**-22


def categorical(rng: jax.Array, logits: jax.Array) -> jax.Array:
    """Draws from softmax(logits).

    Args:
      rng: key.
      logits: [..., V] floating point; -inf is never drawn.

    Returns:
      [...] int32, in [0, V).
    """
    size = logits.shape[-1]
    block = math.isqrt(size - 1) + 1
    count = -(-size // block)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, count * block - size)]
    weights = jnp.pad(weights, padding).reshape(*logits.shape[:-1], count, block)
    blocks = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)  # [..., N]
    drawn = jax.random.uniform(rng, logits.shape[:-1]) * blocks[..., -1]
    which = _first_above(blocks, drawn)
    before = jnp.where(which > 0, _at(blocks, which - 1), 0.0)
    own = jnp.take_along_axis(weights, which[..., None, None], axis=-2)[..., 0, :]
    return which * block + _first_above(jnp.cumsum(own, axis=-1), drawn - before)


def _first_above(ascending: jax.Array, value: jax.Array) -> jax.Array:
    """[..., N], [...] -> where `ascending` first exceeds the value: something is there.

    Rounding may have made the value as large as the last one.
    """
    value = jnp.minimum(value, ascending[..., -1] * _JUST_BELOW_ONE)
    return jnp.sum(ascending <= value[..., None], axis=-1, dtype=jnp.int32)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
