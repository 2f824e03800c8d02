"""Shorter floating-point types: C_FP16 of eq. 5, and bfloat16."""

import jax
import jax.numpy as jnp

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves


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
    >>> payload.tree.tolist()
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

    def encode(leaf: jax.Array) -> jax.Array:
        full = leaf.astype(jnp.float32)
        clamped = jnp.clip(full, -limit, limit)
        return jnp.where(jnp.isinf(full), full, clamped).astype(dtype)

    return leaves.per_leaf(encode, lambda short, like: short, name)
