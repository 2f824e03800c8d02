"""Eight and four bits a value, with a float32 scale for each group of values.

A group that holds NaN or Inf gets the scale NaN, and so decodes as NaN throughout:
what is wrong stays visible. A group of zeros has the scale 0 and decodes to zeros; so
does one whose scale would be denormal (below 1.2e-38), which no CPU or GPU keeps apart.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves

TINY = 2.0**-126  # least normal float32
# Added to |x| < 2^22, this leaves round(x) in the low bits of the sum: rounding and
# conversion in one addition, where XLA's own conversion also saturates and tests NaN.
ROUNDER = 1.5 * 2.0**23
FRACTION = 15  # bits of the random number that decides stochastic rounding

FP8 = {  # format -> (bits of mantissa, exponent's bias, largest finite value)
    "e4m3": (3, 7, 448.0),
    "e5m2": (2, 15, 57344.0),
}


@struct.dataclass
class Scaled:
    """Values in units of their group's scale.

    data: uint8 or int8; its layout is the codec's.
    scale: [groups] float32.
    shape, dtype: of the leaf.
    """

    data: jax.Array
    scale: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)


def fp8(format: str = "e4m3") -> codec.Codec:
    """Eight-bit floating point with a scale for each row (last axis).

    Payload: per leaf of n values data [n] uint8, the bits of float8_e4m3fn or
    float8_e5m2, and scale [rows] float32. Wire: n + 4 rows bytes.
    scale = max|x| / 448 (e4m3) or / 57344 (e5m2), so nothing overflows; rounded to
    nearest even, relative error at most 2^-4 (e4m3) or 2^-3 (e5m2) of normal values.
    A row that holds NaN or Inf decodes as NaN.

    >>> codec.ratio(fp8("e5m2"), jax.ShapeDtypeStruct((2, 100), jnp.float32))
    0.26

    Args:
      format: "e4m3", with more precision, or "e5m2", with more range.

    Raises:
      ValueError: if it is neither.
    """
    if format not in FP8:
        raise ValueError(f"format must be e4m3 or e5m2, not {format!r}")
    _, _, limit = FP8[format]
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[format]

    def encode_leaf(leaf: jax.Array) -> Scaled:
        groups, scale, inverse = _scaled(leaf, "row", limit)
        data = _to_fp8(groups * inverse, format).reshape(-1)
        return Scaled(data, scale, leaf.shape, str(leaf.dtype))

    def decode_leaf(node: Scaled) -> jax.Array:
        values = jax.lax.bitcast_convert_type(node.data, dtype).astype(jnp.float32)
        return _descaled(values, node, "row")

    return leaves.codec_of(Scaled, encode_leaf, decode_leaf)


def int8(per: str | int, rounding: str = "nearest", seed: int = 0) -> codec.Codec:
    """Eight-bit integers: q = round(x / s), s = max|x| / 127 of each group.

    Stochastic: q = floor(x / s + u) with u uniform in [0, 1), so that E[q s] = x (as
    QSGD, Alistarh et al. 2017; u in steps of 2^-15).
    Payload: per leaf of n values data [n] int8 and scale [groups] float32.
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

    def decode_leaf(node: Scaled) -> jax.Array:
        return _descaled(node.data.astype(jnp.float32), node, per)

    return _integers(
        127,
        lambda q, size: q.astype(jnp.int8).reshape(-1)[:size],
        decode_leaf,
        per,
        rounding,
        seed,
    )


def int4(per: str | int, rounding: str = "nearest", seed: int = 0) -> codec.Codec:
    """Four-bit integers, two a byte: as `int8` with s = max|x| / 7.

    Payload: per leaf of n values data [ceil(n / 2)] uint8 and scale [groups] float32.
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
        # Halves of the flattened values; cut between groups or within the only one,
        # since XLA then needs no division to find out where a value is in its group.
        groups, width = q.shape
        if q.size == size and groups % 2 == 0:
            low, high = q[: groups // 2], q[groups // 2 :]
        elif q.size == size and groups == 1 and width % 2 == 0:
            low, high = q[:, : width // 2], q[:, width // 2 :]
        else:
            flat = jnp.pad(q.reshape(-1)[:size], (0, size % 2))
            low, high = flat[: flat.size // 2], flat[flat.size // 2 :]
        return ((low & 15) | (high << 4)).astype(jnp.uint8).reshape(-1)

    def decode_leaf(node: Scaled) -> jax.Array:
        # Shifted to the top of an int8 and back, so that the sign comes along.
        low = jax.lax.bitcast_convert_type(node.data << 4, jnp.int8) >> 4
        high = jax.lax.bitcast_convert_type(node.data, jnp.int8) >> 4
        q = jnp.concatenate([low, high])[: math.prod(node.shape)]
        return _descaled(q.astype(jnp.float32), node, per)

    return _integers(7, pack, decode_leaf, per, rounding, seed)


def _integers(
    limit: int,
    pack: Callable[[jax.Array, int], jax.Array],
    decode_leaf: Callable[[Scaled], jax.Array],
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
                groups, scale, inverse = _scaled(leaf, per, limit)
                if stochastic:
                    key = _mix(_mix(jnp.uint32(seed) + count) + jnp.uint32(i))
                    q = _stochastic(groups, inverse, limit, key)
                else:
                    q = _round(groups * inverse)
                data = pack(q, leaf.size)
                nodes[i] = Scaled(data, scale, leaf.shape, str(leaf.dtype))
        return structure.unflatten(nodes), count + 1 if stochastic else ()

    def decode(payload, state):
        return leaves.decode(Scaled, decode_leaf, payload), state

    return codec.Codec(init, encode, decode)


def _grouped(flat: jax.Array, shape: tuple[int, ...], per: str | int) -> jax.Array:
    """[n] values of a leaf of `shape` -> [groups, values in each], zeros at the end."""
    if per == "tensor":
        return flat.reshape(1, flat.size)
    if per == "row":
        return flat.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    size = max(1, min(per, flat.size))
    return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _scaled(leaf: jax.Array, per: str | int, limit: float) -> tuple:
    """The leaf's groups [g, n] float32, their scales [g], and the inverses [g, 1]."""
    groups = _grouped(leaf.astype(jnp.float32).reshape(-1), leaf.shape, per)
    peak = jnp.max(jnp.abs(groups), axis=-1, initial=0.0)
    # Times the inverse, as XLA would have it in some programs and not in others.
    scale = jnp.where(jnp.isfinite(peak), peak * (1 / limit), jnp.nan)
    inverse = jnp.where(scale >= TINY, 1 / scale, 0.0)
    return groups, jnp.where(scale < TINY, 0.0, scale), inverse[:, None]


def _descaled(values: jax.Array, node: Scaled, per: str | int) -> jax.Array:
    groups = _grouped(values.reshape(-1), node.shape, per) * node.scale[:, None]
    flat = groups.reshape(-1)[: math.prod(node.shape)]
    return flat.reshape(node.shape).astype(node.dtype)


def _round(x: jax.Array) -> jax.Array:
    """Nearest integer, to even if halfway, of |x| < 2^22; int32."""
    bits = jax.lax.bitcast_convert_type(x + jnp.float32(ROUNDER), jnp.int32)
    return bits - jnp.float32(ROUNDER).view(jnp.int32)


def _stochastic(
    groups: jax.Array, inverse: jax.Array, limit: int, key: jax.Array
) -> jax.Array:
    """floor(x / s + u), in fixed point: 127 * 2^15 is just below 2^22."""
    row, column = (
        jax.lax.broadcasted_iota(jnp.uint32, groups.shape, axis) for axis in (0, 1)
    )
    random = _mix(row * jnp.uint32(groups.shape[1]) + column + key)
    fixed = _round(groups * (inverse * 2.0**FRACTION))
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


def _to_fp8(x: jax.Array, format: str) -> jax.Array:
    """Bits of float8, rounded to nearest even, of |x| up to the format's largest.

    XLA's own conversion gives the same bits (a test says so) in 2 to 3 times the time
    on a CPU.
    """
    mantissa, bias, _ = FP8[format]
    drop = 23 - mantissa
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & jnp.uint32(0x7FFFFFFF)
    even = (size >> drop) & 1
    normal = (size + ((1 << (drop - 1)) - 1) + even) >> drop
    normal = normal - jnp.uint32((127 - bias) << mantissa)
    # Below the least normal, the spacing is constant: see ROUNDER.
    rounder = jnp.float32(2.0 ** (drop - bias + 1))
    magnitude = jax.lax.bitcast_convert_type(size, jnp.float32)
    denormal = jax.lax.bitcast_convert_type(magnitude + rounder, jnp.uint32)
    denormal = denormal - rounder.view(jnp.uint32)
    small = size < jnp.uint32((127 - bias + 1) << 23)
    sign = (bits >> 24) & 0x80
    return (jnp.where(small, denormal, normal) | sign).astype(jnp.uint8)
