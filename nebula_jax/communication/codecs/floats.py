"""Shorter floating-point types: C_FP16 of eq. 5, bfloat16, and eight bits.

n values of a leaf; rows and D: its leading axes together, and its last axis.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import integers, leaves

FP8_FORMATS = {  # name -> (bits of mantissa, exponent's bias, largest finite value)
    "e4m3": (3, 7, 448.0),
    "e5m2": (2, 15, 57344.0),
}
FP8_TYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@struct.dataclass
class Cast:
    """A leaf in a shorter type.

    data: the leaf's shape.
    dtype: of the leaf; static.
    """

    data: jax.Array
    dtype: str = struct.field(pytree_node=False)


def fp16() -> codec.Codec:
    """Casts every floating-point leaf to float16, rounded to nearest: C_FP16 of eq. 5.

    Payload: per leaf its shape, float16. Wire: 2 n bytes for n values.
    Finite values beyond ±65504 are sent as ±65504; Inf and NaN cross as they are.
    Relative error at most 2^-11 down to 2^-14 (6.1e-5). Below it float16 has steps of
    2^-24, so the absolute error is at most 2^-25 (3e-8), and what is no larger becomes
    0: not for gradients that are a mean over many tokens, unless they are scaled up.
    After a quantizer it rounds the scales alone, in the same way: `int4(64)|fp16` has
    the error of int4 only while the scales are above 2^-14; `bf16` has no such limit.

    >>> spec = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> codec.ratio(fp16(), spec)
    0.5
    >>> payload, _ = fp16().encode(jnp.array([1.0, 1e6, jnp.inf]), ())
    >>> payload.data.tolist()
    [1.0, 65504.0, inf]
    """
    return _cast(jnp.dtype(jnp.float16), "fp16")


def bf16() -> codec.Codec:
    """Casts every floating-point leaf to bfloat16: float32's range, 8 bits of mantissa.

    Payload: per leaf its shape, bfloat16. Wire: 2 n bytes for n values.
    Finite values beyond ±3.39e38 are sent as that; Inf and NaN cross as they are.
    Relative error at most 2^-8.

    >>> codec.ratio(bf16(), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    0.5
    """
    return _cast(jnp.dtype(jnp.bfloat16), "bf16")


def _cast(dtype: jnp.dtype, name: str) -> codec.Codec:
    limit = float(jnp.finfo(dtype).max)

    def encode_leaf(leaf: jax.Array) -> Cast:
        full = leaf.astype(jnp.float32)
        clamped = jnp.clip(full, -limit, limit)
        data = jnp.where(jnp.isinf(full), full, clamped).astype(dtype)
        return Cast(data, str(leaf.dtype))

    def decode_leaf(cast: Cast) -> jax.Array:
        return cast.data.astype(cast.dtype)

    return leaves.codec_of(Cast, encode_leaf, decode_leaf, name)


def fp8(format: str = "e4m3") -> codec.Codec:
    """Casts to eight-bit floating point with a scale for each row (last axis).

    Payload: per leaf of n values data [rows, D] uint8, the bits of float8_e4m3fn or
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
    if format not in FP8_FORMATS:
        raise ValueError(f"format must be e4m3 or e5m2, not {format!r}")
    _, _, limit = FP8_FORMATS[format]

    def encode_leaf(leaf: jax.Array) -> integers.Scaled:
        groups, scale, inverse = integers.scaled(leaf, "row", limit)
        data = _to_fp8(groups * inverse, format)
        return integers.Scaled(data, scale, leaf.shape, str(leaf.dtype))

    def decode_leaf(node: integers.Scaled) -> jax.Array:
        values = jax.lax.bitcast_convert_type(node.data, FP8_TYPES[format])
        return integers.descaled(values.astype(jnp.float32), node, "row")

    name = f"fp8({format})"
    return leaves.codec_of(integers.Scaled, encode_leaf, decode_leaf, name)


def _to_fp8(x: jax.Array, format: str) -> jax.Array:
    """Returns the bits of float8, uint8, rounded to even, of |x| up to the largest."""

    def convert(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(FP8_TYPES[format]), jnp.uint8)

    by_integers = functools.partial(_to_fp8_by_integers, format=format)
    return jax.lax.platform_dependent(x, cpu=by_integers, default=convert)


def _to_fp8_by_integers(x: jax.Array, format: str) -> jax.Array:
    """Converts with the same result as XLA, which takes two to three times as long."""
    mantissa, bias, _ = FP8_FORMATS[format]
    drop = 23 - mantissa
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & jnp.uint32(0x7FFFFFFF)
    even = (size >> drop) & 1
    normal = (size + ((1 << (drop - 1)) - 1) + even) >> drop
    normal = normal - jnp.uint32((127 - bias) << mantissa)
    # Below the least normal, the spacing is constant: an addition rounds.
    rounder = jnp.float32(2.0 ** (drop - bias + 1))
    magnitude = jax.lax.bitcast_convert_type(size, jnp.float32)
    denormal = jax.lax.bitcast_convert_type(magnitude + rounder, jnp.uint32)
    denormal = denormal - rounder.view(jnp.uint32)
    small = size < jnp.uint32((127 - bias + 1) << 23)
    sign = (bits >> 24) & 0x80
    return (jnp.where(small, denormal, normal) | sign).astype(jnp.uint8)
