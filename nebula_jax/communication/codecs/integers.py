"""Eight- and four-bit integers, with a float32 scale for each group of values."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves, scales

# Added to |x| < 2^22, this leaves round(x) in the low bits of the sum: rounding and
# conversion in one addition, where XLA's own conversion also saturates and tests NaN.
ROUNDER = 1.5 * 2.0**23
FRACTION = 15  # bits of the random number that decides stochastic rounding


def int8(per: str | int, rounding: str = "nearest", seed: int = 0) -> codec.Codec:
    """Eight-bit integers: q = round(x / s), s = max|x| / 127 of each group.

    Stochastic: q = floor(x / s + u) with u uniform in [0, 1), so that E[q s] = x (as
    QSGD, Alistarh et al. 2017; u in steps of 2^-15).
    Payload: per leaf of n values data of n int8 and scale [groups] float32.
    Wire: n + 4 groups bytes; 1, the rows, or ceil(n / N) groups.
    Error at most s / 2, stochastic s. A group that holds NaN or Inf decodes as NaN.

    >>> codec.ratio(int8(64), jax.ShapeDtypeStruct((2, 128), jnp.float32))
    0.265625

    Args:
      per: a group is the "tensor", a "row" (last axis), or N consecutive values of the
        flattened leaf (the last block may be shorter).
      rounding: "nearest" (even if halfway), or "stochastic", which counts its calls in
        the sender's state, an uint32.
      seed: of stochastic rounding.

    Raises:
      ValueError: if an argument is none of these.
    """

    def pack(q: jax.Array, size: int) -> jax.Array:
        q = q.astype(jnp.int8)
        return q if q.size == size else q.reshape(-1)[:size]

    return _integers(127, pack, lambda data, size: data, per, rounding, seed)


def int4(per: str | int, rounding: str = "nearest", seed: int = 0) -> codec.Codec:
    """Four-bit integers, two a byte: as `int8` with s = max|x| / 7.

    Payload: per leaf of n values data of ceil(n / 2) uint8 and scale [groups] float32.
    Byte i holds value i in its low half and value ceil(n / 2) + i in its high one: two
    contiguous streams, faster than neighbours in one byte.
    Wire: ceil(n / 2) + 4 groups bytes.
    Error at most s / 2, stochastic s. A group that holds NaN or Inf decodes as NaN.

    >>> codec.ratio(int4(64), jax.ShapeDtypeStruct((2, 128), jnp.float32))
    0.140625

    Args:
      per, rounding, seed: see `int8`.

    Raises:
      ValueError: if an argument is none of these.
    """

    def pack(q: jax.Array, size: int) -> jax.Array:
        groups, width = q.shape
        full = q.size == size
        if not full or (groups % 2 and (groups > 1 or width % 2)):
            q = jnp.pad(q.reshape(-1)[:size], (0, size % 2))
        low, high = jnp.split(q, 2, axis=_halved_axis(q))
        return ((low & 15) | (high << 4)).astype(jnp.uint8)

    def unpack(data: jax.Array, size: int) -> jax.Array:
        # Shifted to the top of an int8 and back, so that the sign comes along.
        low = jax.lax.bitcast_convert_type(data << 4, jnp.int8) >> 4
        high = jax.lax.bitcast_convert_type(data, jnp.int8) >> 4
        q = jnp.concatenate([low, high], axis=_halved_axis(data))
        return q if q.size == size else q[:size]

    return _integers(7, pack, unpack, per, rounding, seed)


def _halved_axis(array: jax.Array) -> int:
    """Along which halves of the flattened values lie: of one group, its columns."""
    return 1 if array.ndim == 2 and len(array) == 1 else 0


def _integers(
    limit: int,
    pack: Callable[[jax.Array, int], jax.Array],
    unpack: Callable[[jax.Array, int], jax.Array],
    per: str | int,
    rounding: str,
    seed: int,
) -> codec.Codec:
    if per not in ("tensor", "row") and not (type(per) is int and per >= 1):
        raise ValueError(f"per must be tensor, row or a block's size, not {per!r}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be nearest or stochastic, not {rounding!r}")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer in [0, 2^32), not {seed!r}")
    stochastic = rounding == "stochastic"

    def init(spec):
        return jnp.uint32(0) if stochastic else ()

    def encode(arrays, count):
        nodes, structure = jax.tree.flatten(arrays)
        for i, leaf in enumerate(nodes):
            if leaves.is_float(leaf):
                groups, scale, inverse = scales.scaled(leaf, per, limit)
                if stochastic:
                    key = _mix(_mix(jnp.uint32(seed) + count) + jnp.uint32(i))
                    q = _stochastic(groups, inverse, limit, key)
                else:
                    q = _round(groups * inverse)
                data = pack(q, leaf.size)
                nodes[i] = scales.Scaled(data, scale, leaf.shape, str(leaf.dtype))
        return structure.unflatten(nodes), count + 1 if stochastic else ()

    def decode_leaf(node: scales.Scaled) -> jax.Array:
        q = unpack(node.data, math.prod(node.shape))
        return scales.descaled(q.astype(jnp.float32), node, per)

    def decode(payload, state):
        return leaves.decode(scales.Scaled, decode_leaf, payload), state

    return codec.Codec(init, encode, decode)


def _round(x: jax.Array) -> jax.Array:
    """Nearest integer, to even if halfway, of |x| < 2^22; int32."""
    bits = jax.lax.bitcast_convert_type(x + jnp.float32(ROUNDER), jnp.int32)
    return bits - jnp.float32(ROUNDER).view(jnp.int32)


def _stochastic(
    groups: jax.Array, inverse: jax.Array, limit: int, key: jax.Array
) -> jax.Array:
    """floor(x / s + u), in fixed point: 127 * 2^15 is just below 2^22."""
    number = jax.lax.iota(jnp.uint32, groups.size).reshape(groups.shape)
    random = _mix(number + key)
    fixed = _round(groups * inverse * 2.0**FRACTION)
    # x / s may exceed the limit by a rounding error.
    fixed = jnp.clip(fixed, -limit << FRACTION, limit << FRACTION)
    return (fixed + (random >> (32 - FRACTION)).astype(jnp.int32)) >> FRACTION


def _mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser (lowbias32, C. Wellons): a hash at the price of a few shifts.

    Enough for rounding, and several times cheaper than `jax.random.bits`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
