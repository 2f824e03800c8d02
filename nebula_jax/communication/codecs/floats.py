"""Shorter floating-point types: C_FP16 of eq. 5, and its sibling bfloat16."""

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves


@struct.dataclass
class Cast:
    """data: the leaf in the shorter type. dtype: the leaf's own."""

    data: jax.Array
    dtype: str = struct.field(pytree_node=False)


def fp16() -> codec.Codec:
    """Every floating-point leaf as float16, rounded to nearest: C_FP16 of eq. 5.

    Payload: per leaf its shape, float16. Wire: 2 n bytes for n values.
    Finite values beyond ±65504 are sent as ±65504; Inf and NaN cross as they are.
    Relative error at most 2^-11 down to 6.1e-5, absolute 2^-25 below.

    >>> spec = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> codec.ratio(fp16(), spec)
    0.5
    >>> payload, _ = fp16().encode(jnp.array([1.0, 1e6, jnp.inf]), ())
    >>> payload.data.tolist()
    [1.0, 65504.0, inf]
    """
    return _cast(jnp.float16)


def bf16() -> codec.Codec:
    """Every floating-point leaf as bfloat16: float32's range, 8 bits of precision.

    Payload: per leaf its shape, bfloat16. Wire: 2 n bytes for n values.
    Finite values beyond ±3.39e38 are sent as that; Inf and NaN cross as they are.
    Relative error at most 2^-8.

    >>> codec.ratio(bf16(), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    0.5
    """
    return _cast(jnp.bfloat16)


def _cast(dtype: jnp.dtype) -> codec.Codec:
    limit = float(jnp.finfo(dtype).max)

    def encode_leaf(leaf: jax.Array) -> Cast:
        full = leaf.astype(jnp.float32)
        clamped = jnp.clip(full, -limit, limit)
        data = jnp.where(jnp.isinf(full), full, clamped).astype(dtype)
        return Cast(data, str(leaf.dtype))

    return leaves.codec_of(Cast, encode_leaf, lambda cast: cast.data.astype(cast.dtype))
