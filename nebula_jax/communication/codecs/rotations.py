"""A random rotation before a quantizer: it spreads outliers over their neighbors.

b: size of a block of the last axis.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import leaves

MAX_BLOCK = 4096  # its matrix takes 64 MB
USEFUL = 8  # values in a block: an outlier among fewer hardly spreads


def hadamard(block: int = 256, seed: int = 0) -> codec.Codec:
    """Rotates blocks of the last axis: random signs, an orthonormal Hadamard matrix.

    y = H S x / sqrt(b), with S diagonal of ±1 and b the largest power of two <= block
    that divides the last axis (Suresh et al. 2017). A rotation loses nothing but
    rounding; it is meant before a quantizer: `hadamard|int4(64)`, since a block with
    one outlier would otherwise be quantized in units of that outlier.
    Payload: per leaf its shape, float32. Wire: 4 n bytes for n values.
    Blocks of fewer than 8 hardly spread anything: a width that 8 does not divide gets a
    CodecWarning. A block that holds NaN or Inf decodes as NaN. What `int4(64)|bf16` and
    the like have made of it is added up without rounding, so that devices which add in
    another order decode the same, unless scales of the block are more than 2^5 apart.

    >>> x = jnp.zeros((1, 4)).at[0, 0].set(2.0)
    >>> payload, _ = hadamard().encode(x, ())
    >>> jnp.abs(payload.tree).tolist()
    [[1.0, 1.0, 1.0, 1.0]]

    Args:
      block: largest size of a block, 1 to 4096.
      seed: of the signs; the same on both ends.

    Raises:
      ValueError: if an argument is out of its range.
    """
    codec.check_integer("block", block, 1, MAX_BLOCK)
    codec.check_integer("seed", seed, 0, 2**32 - 1)

    def matrix(leaf: jax.Array) -> np.ndarray:
        size = math.gcd(leaf.shape[-1], 1 << (block.bit_length() - 1))
        return _rotation(size, seed)

    def encode(leaf: jax.Array) -> jax.Array:
        _warn_if_useless(leaf, block)
        return _times(leaf.astype(jnp.float32), matrix(leaf))

    def decode(rotated: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        back = _times(rotated, matrix(rotated).T)
        # All terms of Inf's own place have one sign, so that it alone would be Inf.
        return jnp.where(jnp.isfinite(back), back, jnp.nan)

    return leaves.per_leaf(encode, decode, f"hadamard({block}, {seed})")


def _warn_if_useless(leaf: jax.Array, block: int) -> None:
    useful = min(USEFUL, 1 << (block.bit_length() - 1))
    if leaf.shape[-1] % useful and leaf.size >= codec.WORTH_SAVING:
        width = leaf.shape[-1]
        warnings.warn(
            f"hadamard does next to nothing to {width} columns: it rotates blocks of"
            f" {math.gcd(width, useful)}, the largest power of two that divides them;"
            f" widths that {useful} divides work, such as {width - width % -useful}",
            codec.CodecWarning,
            stacklevel=2,
        )


@functools.cache
def _rotation(size: int, seed: int) -> np.ndarray:
    """Returns S H, [size, size] of ±1: signs in the matrix cost nothing."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:  # Sylvester's construction
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.RandomState(seed).choice([-1.0, 1.0], (size, 1))
    return (signs * matrix).astype(np.float32)


def _times(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    # One matrix product of 2 n b operations. The fast transform needs 2 n log2 b, but
    # XLA makes several passes through memory of it, and that takes longer.
    rows = x.reshape(-1, len(matrix))
    sums = jnp.dot(rows, matrix, precision="highest")
    return (sums * np.float32(1 / math.sqrt(len(matrix)))).reshape(x.shape)
