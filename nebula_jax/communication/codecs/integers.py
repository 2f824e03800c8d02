"""Eight- and four-bit integers, with a float32 scale for each group of values.

A group that holds NaN or Inf gets the scale NaN, and so decodes as NaN throughout:
errors stay visible. A group of zeros has the scale 0 and decodes to zeros; so does one
whose scale would be denormal (below 1.2e-38), which no CPU or GPU keeps apart.

n values of a leaf, g groups.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves

TINY = 2.0**-126  # least normal float32
ROUNDER = 1.5 * 2.0**23  # added to |x| < 2^22, leaves round(x) in the sum's low bits


@struct.dataclass
class Scaled:
    """The values of one leaf in units of their groups'

    data: uint8 or int8; in the groups' shape, [g, values in each], if all are full,
      else flat. A loop over a flat array would divide to find a value's group.
    scale: [g] float32; one for the tensor.
    """

    data: jax.Array
    scale: jax.Array

    def check_values(self) -> None:
        """Checks, on the host, that float32 scales are 0 or above, or NaN."""
        scale = self.scale
        if isinstance(scale, np.ndarray) and scale.dtype == np.float32:
            bad = (scale < 0) | np.isinf(scale)
            if np.any(bad):
                raise ValueError(f"{scale[bad][0]} is no scale")


def int8(per: str | int) -> codec.Codec:
    """Quantizes to eight-bit integers: q = round(x / s), s = max|x| / 127 of a group.

    Payload: per leaf of n values data of n int8 and scale [groups] float32.
    Wire: n + 4 groups bytes; 1, the rows, or ceil(n / N) groups.
    Error at most s / 2; halfway, q is even. A group that holds NaN or Inf decodes as
    NaN.

    >>> codec.ratio(int8(64), jax.ShapeDtypeStruct((2, 128), jnp.float32))
    0.265625

    Args:
      per: a group is the "tensor", a "row" (last axis), or N consecutive values of the
        flattened leaf (the last block may be shorter).

    Raises:
      ValueError: if it is none of these.
    """

    def pack(q: jax.Array, size: int) -> jax.Array:
        q = q.astype(jnp.int8)
        return q if q.size == size else q.reshape(-1)[:size]

    return _integers("int8", 127, pack, lambda data, size: data, per)


def int4(per: str | int) -> codec.Codec:
    """Quantizes to four-bit integers, two a byte: as `int8` with s = max|x| / 7.

    Payload: per leaf of n values data of ceil(n / 2) uint8 and scale [groups] float32.
    Byte i holds value i in its low half and value ceil(n / 2) + i in its high one: two
    contiguous streams, faster than neighbors in one byte.
    Wire: ceil(n / 2) + 4 groups bytes.
    Error at most s / 2. A group that holds NaN or Inf decodes as NaN.

    >>> codec.ratio(int4(64), jax.ShapeDtypeStruct((2, 128), jnp.float32))
    0.140625

    Args:
      per: see `int8`.

    Raises:
      ValueError: if it is none of these.
    """
    return _integers("int4", 7, pack_nibbles, unpack_nibbles, per)


def pack_nibbles(q: jax.Array, size: int) -> jax.Array:
    """Packs the low halves of the first `size` of [g, values in each] integers.

    Returns [ceil(n / 2)] uint8, in the groups' shape where that can be halved: see
    `int4`.
    """
    groups, width = q.shape
    full = q.size == size
    if not full or (groups % 2 and (groups > 1 or width % 2)):
        q = jnp.pad(q.reshape(-1)[:size], (0, size % 2))
    low, high = jnp.split(q, 2, axis=_halved_axis(q))
    return ((low & 15) | (high << 4)).astype(jnp.uint8)


def unpack_nibbles(data: jax.Array, size: int) -> jax.Array:
    """Unpacks what `pack_nibbles` made: n int8 in [-8, 8), two's complement."""
    # Shifted to the top of an int8 and back, so that the sign comes along.
    low = jax.lax.bitcast_convert_type(data << 4, jnp.int8) >> 4
    high = jax.lax.bitcast_convert_type(data, jnp.int8) >> 4
    q = jnp.concatenate([low, high], axis=_halved_axis(data))
    return q if q.size == size else q[:size]


def _halved_axis(array: jax.Array) -> int:
    """Returns the axis that separates the halves of the flattened values."""
    return 1 if array.ndim == 2 and len(array) == 1 else 0


def _integers(
    name: str,
    limit: int,
    pack: Callable[[jax.Array, int], jax.Array],
    unpack: Callable[[jax.Array, int], jax.Array],
    per: str | int,
) -> codec.Codec:
    if per not in ("tensor", "row") and not (type(per) is int and per >= 1):
        raise ValueError(f"per must be tensor, row or a block's size, not {per!r}")

    def encode(leaf: jax.Array) -> Scaled:
        groups, scale, inverse = scaled(leaf, per, limit)
        return Scaled(pack(_round(groups * inverse), leaf.size), scale)

    def decode(node: Scaled, like: jax.ShapeDtypeStruct) -> jax.Array:
        q = unpack(node.data, like.size).astype(jnp.float32)
        return descaled(q, node.scale, like.shape, per)

    return leaves.per_leaf(encode, decode, f"{name}({per})")


def _round(x: jax.Array) -> jax.Array:
    """Rounds |x| < 2^22 to the nearest integer, to even if halfway; int32."""
    return jax.lax.platform_dependent(
        x, cpu=_round_by_adding, default=lambda x: jnp.round(x).astype(jnp.int32)
    )


def _round_by_adding(x: jax.Array) -> jax.Array:
    """Rounds as jnp.round; XLA's conversion for a CPU also saturates, and tests."""
    bits = jax.lax.bitcast_convert_type(x + jnp.float32(ROUNDER), jnp.int32)
    return bits - jnp.float32(ROUNDER).view(jnp.int32)


def grouped(flat: jax.Array, shape: tuple[int, ...], per: str | int) -> jax.Array:
    """Groups [n] values of a leaf of `shape`: [g, values in each], zeros at the end.

    Per-tensor scaling also uses rows: XLA does not parallelize over one long row.
    """
    if isinstance(per, str):  # tensor or row
        return flat.reshape(math.prod(shape[:-1]), shape[-1])
    size = max(1, min(per, flat.size))
    return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def scaled(
    leaf: jax.Array, per: str | int, limit: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a leaf's groups, float32, their scales [g], and the inverses [g, 1].

    Per tensor, the groups are rows, with one scale and one inverse. `limit` is what the
    largest |x| of a group becomes.
    """
    groups = grouped(leaf.astype(jnp.float32).reshape(-1), leaf.shape, per)
    peak = jnp.max(jnp.abs(groups), axis=-1, initial=0.0)
    if per == "tensor":
        peak = jnp.max(peak, keepdims=True, initial=0.0)
    # Times the inverse, as XLA would have it in some programs and not in others.
    scale = jnp.where(jnp.isfinite(peak), peak * (1 / limit), jnp.nan)
    inverse = jnp.where(scale >= TINY, 1 / scale, 0.0)
    return groups, jnp.where(scale < TINY, 0.0, scale), inverse[:, None]


def descaled(
    values: jax.Array, scale: jax.Array, shape: tuple[int, ...], per: str | int
) -> jax.Array:
    """Returns a leaf of `shape`, float32, from its values in units of their scales."""
    if values.shape[:-1] != scale.shape:
        values = grouped(values.reshape(-1), shape, per)
    return (values * scale[:, None]).reshape(-1)[: math.prod(shape)].reshape(shape)
