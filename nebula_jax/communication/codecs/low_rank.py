"""Low rank: the truncated SVD of eq. 1-5.

m rows, n columns of a matrix A; k its rank on the wire.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves

GROUP = 16  # enough for two cores; the compiled program grows with it


class Factors(NamedTuple):
    """The two factors of a matrix: A ≈ left @ right, [..., m, k] and [..., k, n]."""

    left: jax.Array
    right: jax.Array


def rank(ratio: float, m: int, n: int) -> int:
    """Returns k = floor(ratio * min(m, n)), at least 1.

    >>> rank(0.29, 100, 768)
    29
    """
    # 0.29 * 100 is 28.999999999999996 in binary.
    return max(1, math.floor(ratio * min(m, n) + 1e-9))


def svd(ratio: float, flatten: bool = False) -> codec.Codec:
    """Keeps the k largest singular values and vectors of every matrix: eq. 1-3, 5.

    Eckart and Young: no matrix of rank k is nearer. The factors sent are U_k S_k^1/2
    and S_k^1/2 V_k^T rather than eq. 2's three, so that eq. 4's "+ r" is unnecessary,
    and both have entries of A's order, which float16 holds: `svd(0.6)|fp16` is eq. 5.
    Payload: per leaf [..., m, n] left [..., m, k] and right [..., k, n] of its dtype,
    k = floor(ratio * min(m, n)), at least 1; leaves with fewer than 2 axes pass.
    Wire: k (m + n) values for m n: eq. 4 less its r, so a ratio above
    m n / ((m + n) min(m, n)) makes the tensor larger.
    A matrix that holds NaN or Inf decodes as NaN throughout.

    By eigenvectors of the Gram matrix of the smaller side, several times faster than an
    SVD. In float32, singular values below 3e-4 of the largest merge, but
    their share of the error is as small. Squares of values set the range: above 1e17 a
    matrix decodes as NaN; one all below 1e-15 loses more than it need.

    >>> spec = jax.ShapeDtypeStruct((128, 64, 768), jnp.float32)
    >>> round(codec.ratio(svd(0.5), spec), 3)
    0.542

    Args:
      ratio: r of Table 5, the share of singular values kept, in (0, 1].
      flatten: a leaf [B, L, D] is one matrix [B L, D]; otherwise each sentence [L, D]
        is compressed by itself, as Table 5's ratios show.

    Raises:
      ValueError: if an argument is out of its range.
    """
    codec.check_share("ratio", ratio)
    if type(flatten) is not bool:
        raise ValueError(f"flatten must be true or false, not {flatten!r}")

    def encode(leaf: jax.Array) -> Factors | jax.Array:
        if leaf.ndim < 2:
            return leaf
        matrix = leaf.astype(jnp.float32)
        if flatten:
            matrix = matrix.reshape(-1, leaf.shape[-1])
        left, right = truncated_svd(matrix, rank(ratio, *matrix.shape[-2:]))
        return Factors(left.astype(leaf.dtype), right.astype(leaf.dtype))

    def decode(payload: Factors | jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if not isinstance(payload, Factors):
            return payload
        left, right = (factor.astype(jnp.float32) for factor in payload)
        return _product(left, right).reshape(like.shape)

    name = f"svd({ratio}, {str(flatten).lower()})"
    return leaves.per_leaf(encode, decode, name)


def truncated_svd(matrix: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns U_k S_k^1/2 and S_k^1/2 V_k^T of A [..., m, n] float32.

    NaN throughout unless A is finite.
    """
    if matrix.ndim == 2:
        return _truncated_svd(matrix, k)
    *batch, m, n = matrix.shape
    left, right = jax.lax.platform_dependent(
        matrix.reshape(math.prod(batch), m, n),
        cpu=functools.partial(_one_by_one, k=k),
        default=functools.partial(_truncated_svd, k=k),
    )
    return left.reshape(*batch, m, k), right.reshape(*batch, k, n)


def _one_by_one(matrices: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Decomposes each matrix by itself, GROUP of them at once.

    jaxlib 0.10 spreads a batched LAPACK call over the thread pool that it is called
    in, and waits: a few such calls at once, of several leaves or threads, wait for each
    other for ever. This never does, and is faster too.
    """

    def each(group: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = [_truncated_svd(matrix, k) for matrix in group]
        left, right = zip(*pairs, strict=True)
        return jnp.stack(left), jnp.stack(right)

    whole = len(matrices) // GROUP * GROUP
    parts: list[tuple[jax.Array, ...]] = []
    if whole:
        groups = matrices[:whole].reshape(-1, GROUP, *matrices.shape[1:])
        mapped = jax.lax.map(each, groups)
        parts.append(
            tuple(factor.reshape(whole, *factor.shape[2:]) for factor in mapped)
        )
    if whole < len(matrices):
        parts.append(each(matrices[whole:]))
    left, right = zip(*parts, strict=True)
    return jnp.concatenate(left), jnp.concatenate(right)


def _truncated_svd(matrix: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    m, n = matrix.shape[-2:]
    if n < m:
        vectors, root, inverse = _leading(_product(_transpose(matrix), matrix), k)
        return _product(matrix, vectors * inverse), _transpose(vectors * root)
    vectors, root, inverse = _leading(_product(matrix, _transpose(matrix)), k)
    return vectors * root, _product(_transpose(vectors * inverse), matrix)


def _leading(gram: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, from A A^T = U S^2 U^T, U_k [..., m, k], S_k^1/2, S_k^-1/2 [..., 1, k].

    The factors' product is U_k U_k^T A whatever S is taken to be, so that rounding of
    small eigenvalues does not matter: they are kept from 0, which shares out the range.
    """
    diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None, :]
    finite = jnp.all(jnp.isfinite(diagonal), axis=-1, keepdims=True)
    # LAPACK promises nothing for NaN: it gets zeros instead.
    squares, vectors = jnp.linalg.eigh(jnp.where(finite, gram, 0.0))  # ascending
    singular = jnp.sqrt(jnp.maximum(squares[..., None, -k:], 0.0))
    root = jnp.sqrt(jnp.maximum(singular, 1e-4 * singular[..., -1:]))
    inverse = jnp.where(root > 0, 1 / root, 0.0)
    return vectors[..., -k:], root, jnp.where(finite, inverse, jnp.nan)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # GPUs and TPUs would otherwise multiply with 8 to 11 bits of precision.
    return jnp.matmul(a, b, precision="highest")


def _transpose(matrix: jax.Array) -> jax.Array:
    return jnp.swapaxes(matrix, -1, -2)
