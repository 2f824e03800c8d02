"""Codecs that lose nothing: ids at a few bits, batches without padding.

B batch, L length.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import arrivals, codec, selector
from nebula_jax.communication.codecs import bits as bits_lib

MAX_CAPACITIES = 64  # shapes that jit compiles; 1/64 of a batch is little to gain


@struct.dataclass
class PackedIds:
    """The payload of a leaf: integers at a few bits each, least significant first."""

    data: jax.Array  # [ceil(n * bits / 8)] uint8, for n integers
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # of the integers
    size: int = struct.field(pytree_node=False)  # they are in [0, size)
    dtype: str = struct.field(pytree_node=False)  # of the integers

    @property
    def bits(self) -> int:
        """The bits of an integer."""
        return bits_lib.bits_for(self.size)

    def check_values(self) -> None:
        """Checks, on the host, that all integers are in their range."""
        if self.size < 1 << self.bits:
            count = math.prod(self.shape)
            ids = bits_lib.unpack_on_host(np.asarray(self.data), count, self.bits)
            arrivals.check_range(ids, 0, self.size)


def pack_ids(vocab_size: int) -> codec.Codec:
    """Packs integers in [0, vocab_size) at ceil(log2 V) bits, booleans at one; exact.

    Payload: per int32 or bool leaf of n values data [ceil(n * bits / 8)] uint8; leaves
    of other types pass untouched, NaN and Inf too. Wire: ceil(n * bits / 8) bytes.
    An id outside the range is the caller's bug: it loses its high bits, or is refused
    on arrival.

    >>> spec = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    >>> codec.ratio(pack_ids(250_002), spec)
    0.5625

    Args:
      vocab_size: V, at most 2^31.

    Raises:
      ValueError: if it is not such an integer.
    """
    codec.check_integer("vocab_size", vocab_size, 1, 2**31)

    def encode_leaf(array: jax.Array) -> PackedIds | jax.Array:
        if array.dtype not in (jnp.int32, jnp.bool_):
            return array
        size = 2 if array.dtype == jnp.bool_ else vocab_size
        data = bits_lib.pack(array, bits_lib.bits_for(size))
        return PackedIds(data, array.shape, size, str(array.dtype))

    def decode_leaf(packed: PackedIds) -> jax.Array:
        ids = bits_lib.unpack(packed.data, math.prod(packed.shape), packed.bits)
        return ids.reshape(packed.shape).astype(packed.dtype)

    def decode(payload: codec.Payload) -> codec.Arrays:
        return jax.tree.map(
            lambda node: decode_leaf(node) if isinstance(node, PackedIds) else node,
            payload,
            is_leaf=lambda node: isinstance(node, PackedIds),
        )

    def encode(arrays: codec.Arrays) -> codec.Payload:
        return jax.tree.map(encode_leaf, arrays)

    return codec.stateless(encode, decode, f"pack_ids({vocab_size})")


@struct.dataclass
class Mask:
    """A mask of real positions."""

    data: jax.Array  # [ceil(B * L / 8)] uint8, one bit a position
    shape: tuple[int, int] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False)  # for tokens; the most that are real

    def check_values(self) -> None:
        """Checks, on the host, that there is a slot for every real token."""
        size = math.prod(self.shape)
        marks = np.unpackbits(np.asarray(self.data), count=size, bitorder="little")
        count = int(marks.sum())
        if count > self.slots:
            raise ValueError(f"{count} positions are real; at most {self.slots} can be")


@struct.dataclass
class Tokens:
    """A leaf's values [capacity, ...] at real positions in order, then zeros."""

    values: jax.Array


def pack_tokens(mask: str = "mask", capacities: int = 8) -> selector.Selector:
    """Leaves padding out: exact at real positions, zeros elsewhere.

    A Selector of a codec for each capacity: ceil(i / capacities * B L) slots for
    i = 1 ... capacities. The smallest that holds all real tokens is used, so that jit
    compiles a handful of shapes, and fewer than B L / capacities + 1 unused slots
    cross. It must be the first of its chain:
    `pack_tokens|svd(0.6)|fp16` decomposes one matrix of real tokens.
    Payload: per leaf [B, L, ...] values [capacity, ...] of its own dtype, unused slots
    zero; the mask's data [ceil(B L / 8)] uint8; other leaves untouched.
    Wire: capacity * (bytes of a position) + ceil(B L / 8).
    NaN and Inf cross as they are, except at padding.

    >>> batch = {"mask": jnp.array([[True, False]]), "h": jnp.array([[3.0, jnp.nan]])}
    >>> pack = pack_tokens(capacities=2)
    >>> payload, state = pack.encode(batch, pack.init(batch))
    >>> payload.payload["h"].values.tolist()
    [3.0]
    >>> pack.decode(payload, state)[0]["h"].tolist()
    [[3.0, 0.0]]

    Args:
      mask: key or attribute of the leaf [B, L], bool or integer, not 0 where a
        position is real. Values other than 0 come back as 1.
      capacities: how many.

    Raises:
      ValueError: if capacities is not 1 to 64; when encoding, if not exactly one leaf
        is called `mask`, or it is no such array.
    """
    if type(mask) is not str or not mask:
        raise ValueError(f"mask must be a leaf's name, not {mask!r}")
    codec.check_integer("capacities", capacities, 1, MAX_CAPACITIES)
    made = [_Capacity(mask, part, capacities) for part in range(1, capacities + 1)]
    return selector.Selector(
        codecs=tuple(codec.stateless(each.encode, _decode) for each in made),
        choose=functools.partial(_smallest, made),
        name=f"pack_tokens({mask}, {capacities})",
    )


class _Capacity(NamedTuple):
    """One of the capacities of `pack_tokens`: part / parts of all positions."""

    mask: str
    part: int
    parts: int

    def slots(self, marks: jax.Array) -> int:
        return math.ceil(self.part * math.prod(marks.shape) / self.parts)

    def encode(self, arrays: codec.Arrays) -> codec.Payload:
        marks = _mask(arrays, self.mask)
        slots = self.slots(marks)
        where = _where(bits_lib.bitmap(marks.reshape(-1) != 0), slots)

        def gather(leaf: jax.Array) -> Any:
            if leaf is marks:
                batch, length = marks.shape
                data = bits_lib.pack(marks != 0, 1)
                return Mask(data, (batch, length), str(marks.dtype), slots)
            if leaf.shape[:2] != marks.shape:
                return leaf
            flat = leaf.reshape(-1, *leaf.shape[2:])
            return Tokens(jnp.take(flat, where, 0, mode="fill", fill_value=0))

        return jax.tree.map(gather, arrays)


def _decode(payload: codec.Payload) -> codec.Arrays:
    """Puts values back at real positions; the mask in the payload has these."""
    nodes = jax.tree.leaves(payload, is_leaf=_is_node)
    (packed,) = [node for node in nodes if isinstance(node, Mask)]
    shape, size = packed.shape, math.prod(packed.shape)
    real = bits_lib.to_words(packed.data, math.ceil(size / bits_lib.WORD))
    where = _where(real, packed.slots)

    def scatter(node: Any) -> jax.Array:
        if isinstance(node, Mask):
            marks = bits_lib.unpack(node.data, size, 1)
            return marks.reshape(shape).astype(node.dtype)
        if not isinstance(node, Tokens):
            return node
        rest = node.values.shape[1:]
        flat = jnp.zeros((size, *rest), node.values.dtype)
        return flat.at[where].set(node.values, mode="drop").reshape(*shape, *rest)

    return jax.tree.map(scatter, payload, is_leaf=_is_node)


def _smallest(
    capacities: list[_Capacity], arrays: codec.Arrays, state: codec.State, step: int
) -> int:
    """Returns the number of the smallest capacity that holds all real tokens."""
    del state, step
    marks = _mask(arrays, capacities[0].mask)
    count = int(jnp.count_nonzero(marks))
    return next(n for n, each in enumerate(capacities) if each.slots(marks) >= count)


def _is_node(node: Any) -> bool:
    return isinstance(node, Mask | Tokens)


def _mask(arrays: codec.Arrays, name: str) -> jax.Array:
    """Returns the leaf with that dict key or attribute, checked to be a mask."""
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
        if path
        and name in (getattr(path[-1], "key", None), getattr(path[-1], "name", None))
    ]
    if len(found) != 1:
        raise ValueError(f"one leaf must be called {name!r}; {len(found)} are")
    (marks,) = found
    if len(marks.shape) != 2 or not (
        marks.dtype == jnp.bool_ or jnp.issubdtype(marks.dtype, jnp.integer)
    ):
        raise ValueError(
            f"{name!r} must be bool or integer [B, L], not {marks.dtype}"
            f" {list(marks.shape)}"
        )
    return marks


def _where(real: jax.Array, slots: int) -> jax.Array:
    """Returns [slots] positions of real tokens, then one that does not exist."""
    found = bits_lib.positions(real, slots)
    past = real.size * bits_lib.WORD
    return jnp.where(jnp.arange(slots) < bits_lib.count(real), found, past)
