"""Kinds of scaled dot-product attention: written out, or as one operation of JAX.

B batch, Q query positions, M key and value positions, H heads, K head width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from nebula_jax.models import mixed_precision

CUDNN_WIDTH = 128  # of a head; newer GPUs take more


def einsum(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    dtype: jax.typing.DTypeLike,
    drop: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes attention as two products, with the probabilities in memory.

    Args:
      query: [B, Q, H, K] float32.
      key, value: [B, M, H, K] float32.
      mask: [B or 1, Q or 1, M] bool, true where a query may attend.
      dtype: of the products' operands.
      drop: dropout of the probabilities [B, H, Q, M].

    Returns:
      [B, Q, H, K] float32.
    """
    scores = mixed_precision.einsum("bqhk,bmhk->bhqm", query, key, dtype)
    scores = scores * query.shape[-1] ** -0.5
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask[:, None, :, :], scores, lowest)
    shares = drop(jax.nn.softmax(scores))
    return mixed_precision.einsum("bhqm,bmhk->bqhk", shares, value, dtype)


def fused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    dtype: jax.typing.DTypeLike,
    drop: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes attention as one operation; arguments and result are those of `einsum`.

    On a GPU, with operands of two bytes, it is cuDNN's flash attention: no [B, H, Q, M]
    is in memory. It needs Q and M even, and heads of a width that is a multiple of 8,
    at most 128. Elsewhere it is what JAX has, which on CPUs is no faster than
    `einsum`. Unlike there the result is rounded to `dtype`, and nothing is dropped: the
    probabilities are nowhere to be had.
    """
    del drop
    query, key, value = (each.astype(dtype) for each in (query, key, value))
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    attended = jax.nn.dot_product_attention(
        query,
        key,
        value,
        # cuDNN broadcasts neither rows nor queries of a mask.
        mask=jnp.broadcast_to(mask, (batch, queries, keys))[:, None],
        implementation="cudnn" if _has_cudnn(query, key) else "xla",
    )
    return attended.astype(jnp.float32)


def _has_cudnn(query: jax.Array, key: jax.Array) -> bool:
    """Returns True if this is a GPU, and cuDNN has a gradient for these shapes."""
    even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    width = query.shape[-1]
    fits = even and width % 8 == 0 and width <= CUDNN_WIDTH
    return jax.default_backend() == "gpu" and query.dtype.itemsize == 2 and fits


KINDS = {"einsum": einsum, "fused": fused}
