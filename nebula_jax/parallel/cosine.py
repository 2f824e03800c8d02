"""The cosine of two trees of arrays: how far a codec turns what is trained with."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def similarity(one: Any, other: Any) -> jax.Array:
    """Returns the cosine of two trees of arrays; -1 if one is 0 or not finite.

    Args:
      one, other: alike in structure and shapes, floating-point.

    Returns:
      [] float32.
    """

    def product(a: Any, b: Any) -> jax.Array:
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.zeros(()))

    # Each by itself: the product of two small squares is 0 in float32.
    shares = [jax.lax.rsqrt(product(each, each)) for each in (one, other)]
    cosine = product(one, other) * shares[0] * shares[1]
    return jnp.where(jnp.isfinite(cosine), cosine, -1.0)
