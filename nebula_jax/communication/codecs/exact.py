"""The codecs. Each is a function that returns a `codec.Codec`."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec

WORD = 32  # bits of the integers that packing works on


@struct.dataclass
class PackedIds:
    """Integers at a few bits each, least significant bit first.

    data: [ceil(size * bits / 8)] uint8.
    shape, bits, dtype: of the integers; static, known to both ends by the spec.
    """

    data: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    bits: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)


def bits_for(vocab_size: int) -> int:
    """Bits that tell `vocab_size` ids apart: 18 for the paper's 250,002."""
    return max(1, (vocab_size - 1).bit_length())


def pack_ids(vocab_size: int) -> codec.Codec:
    """Exact: integers in [0, vocab_size) at ceil(log2 V) bits, booleans at one.

    The wire holds ceil(n * bits / 8) bytes for n integers. An id outside the range is
    the caller's bug and loses its high bits.

    >>> spec = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    >>> codec.ratio(pack_ids(250_002), spec)
    0.5625

    Args:
      vocab_size: V.

    Returns:
      A Codec that maps every leaf of a pytree of int32 or bool arrays.
    """

    def encode_leaf(array: jax.Array) -> PackedIds:
        bits = 1 if array.dtype == jnp.bool_ else bits_for(vocab_size)
        return PackedIds(_pack(array, bits), array.shape, bits, str(array.dtype))

    def decode_leaf(packed: PackedIds) -> jax.Array:
        size = math.prod(packed.shape)
        return (
            _unpack(packed.data, size, packed.bits)
            .reshape(packed.shape)
            .astype(packed.dtype)
        )

    def decode(payload):
        return jax.tree.map(
            decode_leaf, payload, is_leaf=lambda node: isinstance(node, PackedIds)
        )

    return codec.stateless(lambda arrays: jax.tree.map(encode_leaf, arrays), decode)


# 32 ids of b bits are exactly b words of 32 bits, so all shifts are constants: the
# loops below unroll into b + 31 elementwise operations over columns.


def _pack(array: jax.Array, bits: int) -> jax.Array:
    ids = array.reshape(-1).astype(jnp.uint32)
    ids = jnp.pad(ids, (0, -ids.size % WORD)).reshape(-1, WORD)
    ids = ids & jnp.uint32((1 << bits) - 1)
    words = [jnp.zeros(ids.shape[0], jnp.uint32)] * bits
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        words[word] = words[word] | (ids[:, i] << shift)
        if shift + bits > WORD:
            words[word + 1] = words[word + 1] | (ids[:, i] >> (WORD - shift))
    packed = jax.lax.bitcast_convert_type(jnp.stack(words, axis=-1), jnp.uint8)
    return packed.reshape(-1)[: math.ceil(array.size * bits / 8)]


def _unpack(data: jax.Array, size: int, bits: int) -> jax.Array:
    groups = math.ceil(size / WORD)
    data = jnp.pad(data, (0, groups * bits * WORD // 8 - data.size))
    words = jax.lax.bitcast_convert_type(
        data.reshape(groups, bits, WORD // 8), jnp.uint32
    )
    ids = []
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        value = words[:, word] >> shift
        if shift + bits > WORD:
            value = value | (words[:, word + 1] << (WORD - shift))
        ids.append(value & jnp.uint32((1 << bits) - 1))
    return jnp.stack(ids, axis=-1).reshape(-1)[:size]
