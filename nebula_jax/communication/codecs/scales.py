"""Groups of values, and a float32 scale for each: what all quantisers share.

A group that holds NaN or Inf gets the scale NaN, and so decodes as NaN throughout:
what is wrong stays visible. A group of zeros has the scale 0 and decodes to zeros; so
does one whose scale would be denormal (below 1.2e-38), which no CPU or GPU keeps apart.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

TINY = 2.0**-126  # least normal float32


@struct.dataclass
class Scaled:
    """Values in units of their group's scale.

    data: uint8 or int8; in the groups' shape, [groups, values in each], if all are
      full, else flat. A loop over a flat array would divide to find a value's group.
    scale: [groups] float32; one for the tensor.
    shape, dtype: of the leaf.
    """

    data: jax.Array
    scale: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)


def grouped(flat: jax.Array, shape: tuple[int, ...], per: str | int) -> jax.Array:
    """[n] values of a leaf of `shape` -> [groups, values in each], zeros at the end.

    Of the "tensor" too, rows: XLA runs a loop over one long row in one thread.
    """
    if per in ("tensor", "row"):
        return flat.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    size = max(1, min(per, flat.size))
    return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def scaled(
    leaf: jax.Array, per: str | int, limit: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A leaf's groups [g, n] float32, their scales [g], and the inverses [g, 1].

    Of the "tensor", rows, one scale, and one inverse.

    Args:
      leaf: floating-point.
      per: what a group is, see `int8`.
      limit: what the largest |x| of a group becomes.
    """
    groups = grouped(leaf.astype(jnp.float32).reshape(-1), leaf.shape, per)
    peak = jnp.max(jnp.abs(groups), axis=-1, initial=0.0)
    if per == "tensor":
        peak = jnp.max(peak, keepdims=True, initial=0.0)
    # Times the inverse, as XLA would have it in some programs and not in others.
    scale = jnp.where(jnp.isfinite(peak), peak * (1 / limit), jnp.nan)
    inverse = jnp.where(scale >= TINY, 1 / scale, 0.0)
    return groups, jnp.where(scale < TINY, 0.0, scale), inverse[:, None]


def descaled(values: jax.Array, node: Scaled, per: str | int) -> jax.Array:
    """The leaf of `node` from its values in units of their scales, float32."""
    if values.shape[:-1] != node.scale.shape:
        values = grouped(values.reshape(-1), node.shape, per)
    flat = (values * node.scale[:, None]).reshape(-1)[: math.prod(node.shape)]
    return flat.reshape(node.shape).astype(node.dtype)
