"""A sample of a distribution over a vocabulary, for two random numbers each.

`jax.random.categorical` draws a number for every piece of the vocabulary and takes two
logarithms of it: on a CPU a sixth of a generator's step. Here one number is looked up
in the cumulative distribution of blocks of about sqrt(V) pieces, and another in that
of the block's pieces. Probabilities are exact to 2^-23 of the whole and of the block.

V vocabulary, C pieces of a block, N blocks or pieces.
"""

import math

import jax
import jax.numpy as jnp


def categorical(rng: jax.Array, logits: jax.Array) -> jax.Array:
    """Draws from softmax(logits).

    Args:
      rng: key.
      logits: [..., V] floating point, finite or -inf, which is never drawn; not all of
        a row -inf.

    Returns:
      [...] int32, in [0, V).
    """
    logits = logits.astype(jnp.float32)
    size = logits.shape[-1]
    block = math.isqrt(size - 1) + 1
    count = -(-size // block)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, count * block - size)]
    weights = jnp.pad(weights, padding).reshape(*logits.shape[:-1], count, block)
    which_rng, inside_rng = jax.random.split(rng)
    which = _draw(which_rng, jnp.sum(weights, axis=-1))
    own = jnp.take_along_axis(weights, which[..., None, None], axis=-2)[..., 0, :]
    return which * block + _draw(inside_rng, own)


def _draw(rng: jax.Array, weights: jax.Array) -> jax.Array:
    """[..., N], at least 0 -> [...] int32, each as often as its weight says."""
    is_possible = weights > 0
    cumulative = jnp.where(is_possible, jnp.cumsum(weights, axis=-1), 0.0)
    # A uniform number is at most 1 - 2^-23, so that this is less than the maximum.
    value = jax.random.uniform(rng, weights.shape[:-1]) * jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > value[..., None], axis=-1).astype(jnp.int32)
