"""The largest values of each block, at two bits each: SparseLoCo.

n values of a leaf, K of them on the wire, k of each full block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import arrivals, codec
from nebula_jax.communication.codecs import bits, leaves

BINS = 4
CODE_BITS = 2
SIGMAS = 6  # standard deviations that the bins span


@struct.dataclass
class Kept:
    """The values of one leaf that cross, by block and in each by position."""

    index: jax.Array  # [ceil(K w / 8)] uint8, positions in their blocks at w bits each
    codes: jax.Array  # [ceil(K / 4)] uint8, the number of each value's level at 2 bits
    levels: jax.Array  # [4] float32
    size: int = struct.field(pytree_node=False)  # n, values of the leaf
    k: int = struct.field(pytree_node=False)
    block: int = struct.field(pytree_node=False)

    def check_values(self) -> None:
        """Checks, on the host, that positions ascend; float32 levels are finite."""
        full, rest, last = layout(self.size, self.k, self.block)
        count = full * self.k + last
        packed = np.asarray(self.index)
        index = bits.unpack_on_host(packed, count, bits.bits_for(self.block))
        arrivals.check_range(index[: full * self.k], 0, self.block)
        arrivals.check_range(index[full * self.k :], 0, rest)
        # In one row of all blocks, so that each begins above where the last one ends.
        number = np.arange(count, dtype=np.uint64) // np.uint64(self.k)
        index = index + number * np.uint64(self.block)
        if np.any(index[1:] <= index[:-1]):
            raise ValueError("positions do not ascend")
        if isinstance(self.levels, np.ndarray) and self.levels.dtype == np.float32:
            arrivals.check_finite(self.levels)


def layout(size: int, k: int, block: int) -> tuple[int, int, int]:
    """Returns a leaf's full blocks, the values after them, and how many of those stay.

    >>> layout(size=10_000, k=32, block=4096)
    (2, 1808, 14)
    """
    full, rest = divmod(size, block)
    return full, rest, max(1, k * rest // block) if rest else 0


def sparse_loco(k: int = 32, block: int = 4096) -> codec.Codec:
    """Keeps the k largest |x| of each block, at two bits each; zeros elsewhere.

    SparseLoCo (arXiv 2508.15706); biased, so meant inside `error_feedback`. Exact
    selection, ties by lower index. A last block of m < block values keeps
    max(1, floor(k m / block)). The K kept values v of a leaf share four levels:
    q = clip(round((v - μ) / s + 2), 0, 3), μ = mean v, s = 6 σ / 4 with σ² the mean of
    (v - μ)²; level b is μ plus the mean of v - μ over q = b, and μ if there is none.
    With σ = 0, q = 2.
    Payload: per leaf index uint8, positions in their blocks, ascending in each, at
    w = ceil(log2 block) bits, at least 1; codes uint8, q at 2 bits, both least
    significant bit first; levels [4] float32.
    Wire: ceil(K w / 8) + ceil(K / 4) + 16 bytes: 14 bits a kept value at block = 4096.
    NaN counts as larger than Inf, so both are kept, and make all levels of their leaf
    NaN: `arrivals.check_payload` then refuses the payload, and a decoder without it
    gives NaN at all kept positions.
    Decoding places levels and computes nothing, so it is the same on every device.

    >>> x = jnp.array([1.0, -16.0, 7.75, 2.0, 0.0, 8.25])
    >>> payload, _ = sparse_loco(k=2, block=4).encode(x, ())
    >>> sparse_loco(k=2, block=4).decode(payload, ())[0].tolist()
    [0.0, -16.0, 8.0, 0.0, 0.0, 8.0]

    Args:
      k: 1 to block.
      block: consecutive values of the flattened leaf.

    Raises:
      ValueError: if an argument is out of its range.
    """
    codec.check_integer("block", block, 1, 2**24)
    codec.check_integer("k", k, 1, block)
    encode = functools.partial(_encode, k, block)
    return leaves.per_leaf(encode, _decode, f"sparse_loco({k}, {block})")


def _encode(k: int, block: int, leaf: jax.Array) -> Kept:
    flat = leaf.astype(jnp.float32).reshape(-1)
    full, rest, last = layout(flat.size, k, block)
    parts = []
    if full:
        parts.append(_largest(flat[: full * block].reshape(full, block), k))
    if rest:
        parts.append(_largest(flat[full * block :].reshape(1, rest), last))
    index, values = (
        jnp.concatenate([part[i].reshape(-1) for part in parts]) for i in (0, 1)
    )
    codes, levels = _quantized(values)
    return Kept(
        index=bits.pack(index, bits.bits_for(block)),
        codes=bits.pack(codes, CODE_BITS),
        levels=levels,
        size=leaf.size,
        k=k,
        block=block,
    )


def _decode(node: Kept, like: jax.ShapeDtypeStruct) -> jax.Array:
    full, _, last = layout(node.size, node.k, node.block)
    count = full * node.k + last
    index = bits.unpack(node.index, count, bits.bits_for(node.block)).astype(jnp.int32)
    index = index + jnp.arange(count, dtype=jnp.int32) // node.k * node.block
    values = node.levels[bits.unpack(node.codes, count, CODE_BITS)]
    places = jnp.zeros(node.size, jnp.float32).at[index]
    flat = places.set(values, mode="drop", indices_are_sorted=True, unique_indices=True)
    return flat.reshape(like.shape)


def _largest(blocks: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Selects the k largest |x| of each block, ties by lower index, NaN above Inf.

    Returns positions [g, k] int32, ascending, and the values there.
    """
    size = jax.lax.bitcast_convert_type(blocks, jnp.int32) & jnp.int32(0x7FFFFFFF)
    index = jax.lax.platform_dependent(
        size,
        # XLA's selection for a CPU takes float32 alone, and compares its bits; integers
        # it sorts, which takes 40 times as long.
        cpu=lambda size: _top(jax.lax.bitcast_convert_type(size, jnp.float32), k),
        default=lambda size: _top(size, k),
    )
    index = jnp.sort(index, axis=-1)
    return index, jnp.take_along_axis(blocks, index, axis=-1)


def _top(size: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(size, k)[1]


def _quantized(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes [K] int32 and the levels [4] of kept values [K], float32.

    In units of the largest value's power of two, so that no square overflows, and none
    that matters underflows.
    """
    largest = jnp.max(jnp.abs(values))
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    unit = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    values = jnp.where(unit > 0, values / unit, 0.0)
    shift = jnp.mean(values)
    centered = values - shift
    step = SIGMAS / BINS * jnp.sqrt(jnp.mean(centered**2))
    place = jnp.where(step > 0, centered / step, 0.0) + BINS / 2
    codes = jnp.clip(jnp.round(place), 0, BINS - 1).astype(jnp.int32)
    chosen = codes[None] == jnp.arange(BINS, dtype=jnp.int32)[:, None]
    count = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    offset = jnp.sum(jnp.where(chosen, centered[None], 0.0), axis=1)
    levels = (shift + offset / jnp.maximum(count, 1)) * unit
    return codes, jnp.where(jnp.isfinite(largest), levels, jnp.nan)
