"""The largest values only, with their positions.

n values of a leaf, k of them on the wire.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import arrivals, codec
from nebula_jax.communication.codecs import bits, leaves


@struct.dataclass
class Largest:
    """The largest values of one leaf.

    values: [k] of the leaf's dtype, by position.
    positions: [...] uint8, a bitmap or packed indices, see `top_k`.
    shape: of the leaf; static.
    count: k; static.
    """

    values: jax.Array
    positions: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    count: int = struct.field(pytree_node=False)

    def check_values(self) -> None:
        """Checks, on the host, that there are k positions, each once and in order."""
        data, size = np.asarray(self.positions), math.prod(self.shape)
        if not _by_index(size, self.count):
            marks = bits.count_on_host(data, size)
            if marks != self.count:
                raise ValueError(f"{marks} positions are marked, not {self.count}")
            return
        index = bits.unpack_on_host(data, self.count, bits.bits_for(size))
        arrivals.check_range(index, 0, size)
        if np.any(index[1:] <= index[:-1]):
            raise ValueError("positions do not ascend")


def top_k(fraction: float) -> codec.Codec:
    """Keeps the k = max(1, floor(fraction * n)) largest |x| of a leaf; zeros elsewhere.

    Exact selection, ties by lower index (Top-K of Stich et al. 2018; biased, so meant
    inside `error_feedback`).
    Payload: per leaf values [k] of its own dtype in order of position, and positions
    uint8: a bitmap [ceil(n / 8)], or k indices at ceil(log2 n) bits
    [ceil(k ceil(log2 n) / 8)], whichever is smaller.
    Wire: k itemsize + min(ceil(n / 8), ceil(k ceil(log2 n) / 8)) bytes.
    NaN counts as larger than Inf, so both are carried.

    >>> x = jnp.array([1.0, -3.0, 2.0, jnp.nan])
    >>> payload, _ = top_k(0.5).encode(x, ())
    >>> top_k(0.5).decode(payload, ())[0].tolist()
    [0.0, -3.0, 0.0, nan]

    Args:
      fraction: in (0, 1].

    Raises:
      ValueError: if it is not.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise ValueError(f"fraction must be a number, not {fraction!r}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")

    def encode_leaf(leaf: jax.Array) -> Largest | jax.Array:
        if not leaf.size:
            return leaf
        flat = leaf.reshape(-1)
        k = max(1, math.floor(fraction * flat.size + 1e-9))  # see low_rank.rank
        chosen = largest(flat, k)
        index = bits.positions(chosen, k)
        if _by_index(flat.size, k):
            where = bits.pack(index, bits.bits_for(flat.size))
        else:
            where = jax.lax.bitcast_convert_type(chosen, jnp.uint8).reshape(-1)
            where = where[: math.ceil(flat.size / 8)]
        return Largest(flat[index], where, leaf.shape, k)

    def decode_leaf(node: Largest) -> jax.Array:
        size, k = math.prod(node.shape), node.count
        if _by_index(size, k):
            index = bits.unpack(node.positions, k, bits.bits_for(size))
        else:
            words = bits.to_words(node.positions, math.ceil(size / bits.WORD))
            index = bits.positions(words, k)
        flat = (
            jnp.zeros(size, node.values.dtype)
            .at[index]
            .set(node.values, mode="drop", indices_are_sorted=True, unique_indices=True)
        )
        return flat.reshape(node.shape)

    return leaves.codec_of(Largest, encode_leaf, decode_leaf, f"top_k({fraction})")


def _by_index(size: int, k: int) -> bool:
    return k * bits.bits_for(size) < size


def largest(flat: jax.Array, k: int) -> jax.Array:
    """Returns a bitmap [ceil(n / 32)] uint32 of the k largest |x| of [n].

    Ties go to the lower index. The bits of |x| order as |x| does, NaN above Inf.
    """
    size = jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
    return jax.lax.platform_dependent(
        size & jnp.uint32(0x7FFFFFFF),
        cpu=functools.partial(_largest_by_threshold, k=k),
        default=functools.partial(_largest_by_sorting, k=k),
    )


def _largest_by_sorting(size: jax.Array, k: int) -> jax.Array:
    _, index = jax.lax.top_k(size.astype(jnp.int32), k)
    return bits.bitmap(jnp.zeros(size.shape, jnp.bool_).at[index].set(True))


Search = tuple[jax.Array, jax.Array, jax.Array]
"""The lowest and highest threshold that remain, and 0 once it is found."""


def _largest_by_threshold(size: jax.Array, k: int) -> jax.Array:
    """Returns the same bitmap, faster on a CPU.

    The k-th largest is found by counting how many are at least some threshold, which is
    a pass through memory; some 30 of them are faster than `lax.top_k` on a CPU: 2 times
    for 1 % of 6 million values, 20 times for 10 %.
    """

    def halve(search: Search) -> Search:
        low, high, _ = search
        middle = low + (high - low + 1) // 2
        count = bits.count(bits.bitmap(size >= middle))
        enough = count >= k
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(count == k, 0, high - low),
        )

    # Of all values whose bits are at least `low` there are at least k.
    everything = jnp.uint32(0), jnp.uint32(0x7FFFFFFF), jnp.uint32(1)
    threshold, _, _ = jax.lax.while_loop(
        lambda search: (search[0] < search[1]) & (search[2] > 0), halve, everything
    )
    above, ties = bits.bitmap(size > threshold), bits.bitmap(size == threshold)
    return above | bits.first(ties, k - bits.count(above))
