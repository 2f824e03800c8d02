"""Four-bit floats without a mantissa, and a float32 scale for each block: E3M0.

A value is a sign and a power of two times its block's largest |x|: seven octaves, where
the steps of an `int4` are equal. For differences of parameters, most of which are far
smaller than the largest (Streaming DiLoCo, arXiv 2501.18512).

n values of a leaf, g blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import integers, leaves

LEAST = 2.0**-119
"""The least scale: half of its lowest level, 2^-7 of it, is still a normal float32."""
TOP = 7  # level of the scale itself
OCTAVE = 1 << 23  # between the bits of a float32 and of its double
MANTISSA = OCTAVE - 1
SIGN = np.int32(-(2**31))
NEVER = np.int32(2**31 - 1)  # above the bits of every |x|


@struct.dataclass
class Levels(integers.Scaled):
    """The values of one leaf as signs and levels: two a byte, as those of `int4`."""

    def check_values(self) -> None:
        """Checks, on the host, that scales are 0, at least 2^-119, or NaN.

        A smaller one makes values that some devices flush to 0 and others keep.
        """
        super().check_values()
        scale = self.scale
        if isinstance(scale, np.ndarray) and scale.dtype == np.float32:
            bad = (scale > 0) & (scale < LEAST)
            if np.any(bad):
                raise ValueError(f"{scale[bad][0]} is no scale")


def e3m0(block: int = 256) -> codec.Codec:
    """Rounds to sign 2^(L - 7) s, 1 <= L <= 7, or to 0 (L = 0): s = max|x| of a block.

    Nearest in value; halfway, the larger in size: 3/4 s goes to s, s / 128 to s / 64.
    Payload: per leaf of n values data of ceil(n / 2) uint8 and scale [blocks] float32.
    A value's four bits are its sign and L. Byte i holds value i in its low half and
    value ceil(n / 2) + i in its high one, as in `int4`.
    Wire: ceil(n / 2) + 4 ceil(n / block) bytes: 4.125 bits a value in blocks of 256.
    Error at most |x| / 3, but for |x| below s / 64, where it is at most s / 128.
    A block that holds NaN or Inf decodes as NaN. One with s below 2^-119 decodes as
    zeros: parts of s would be denormal, which no CPU or GPU keeps apart.
    Decoding multiplies by a power of two, and so is exact: float32 leaves have the same
    bits on every device.

    >>> payload, _ = e3m0().encode(jnp.array([8.0, -6.0, 5.9, 0.07, 0.06]), ())
    >>> e3m0().decode(payload, ())[0].tolist()
    [8.0, -8.0, 4.0, 0.125, 0.0]

    Args:
      block: consecutive values of the flattened leaf that share a scale (the last block
        may be shorter).

    Raises:
      ValueError: if it is no positive integer.
    """
    codec.check_integer("block", block, 1)

    def encode(leaf: jax.Array) -> Levels:
        flat = leaf.astype(jnp.float32).reshape(-1)
        blocks = integers.grouped(flat, leaf.shape, block)
        largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)
        scale = jnp.where(jnp.isfinite(largest), largest, jnp.nan)
        scale = jnp.where(scale < LEAST, 0.0, scale)
        nibbles = _nibbles(blocks, scale[:, None])
        return Levels(integers.pack_nibbles(nibbles, leaf.size), scale)

    def decode(node: Levels, like: jax.ShapeDtypeStruct) -> jax.Array:
        q = integers.unpack_nibbles(node.data, like.size)
        return integers.descaled(_powers(q), node.scale, like.shape, block)

    return leaves.per_leaf(encode, decode, f"e3m0({block})")


def _nibbles(blocks: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns signs and levels, [g, values in each] int32 in [0, 16).

    Compares the bits of float32, which order as the numbers do, and by integers: a
    quotient would be rounded, and differently from device to device.
    """
    bits = jax.lax.bitcast_convert_type(blocks, jnp.int32)
    size = bits & ~SIGN
    one = jax.lax.bitcast_convert_type(scale, jnp.int32)
    # The least float32 that is at least 3/4 of the scale: from there on the level is 7,
    # from an octave below it 6, and so on.
    whole = 3 * ((one & MANTISSA) | OCTAVE)
    half, quarter = (whole + 1) >> 1, (whole + 3) >> 2
    start = (one & ~MANTISSA) - OCTAVE  # the exponent, for a mantissa with its first 1
    top = start + jnp.where(half < 2 * OCTAVE, half - OCTAVE, quarter)
    level = jnp.maximum((size - (top - TOP * OCTAVE)) >> 23, 1)
    # Half of the lowest level; without a scale there is none.
    least = jnp.where(scale > 0, one - TOP * OCTAVE, NEVER)
    return jnp.where(size >= least, level | ((bits >> 28) & 8), 0)


def _powers(q: jax.Array) -> jax.Array:
    """Returns sign 2^(L - 7), or 0 for level 0, float32, of int8 in [-8, 8)."""
    q = q.astype(jnp.int32)
    level = q & 7
    exponent = jnp.where(level > 0, (level + (127 - TOP)) << 23, 0)
    return jax.lax.bitcast_convert_type((q & SIGN) | exponent, jnp.float32)
