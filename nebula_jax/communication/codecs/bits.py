"""Integers at a few bits each, and the positions of marks in a bitmap.

The order of bits is that of `np.packbits(bitorder="little")`, least significant first.

On a CPU packing works on words: 32 integers of b bits are exactly b words of 32 bits,
so in a table of 32 columns the columns that make up a word, and their shifts, are the
same in every row, and known when compiling.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

WORD = 32  # bits of the integers that packing works on


def bits_for(size: int) -> int:
    """Returns the bits that distinguish `size` ids: 18 for the paper's 250,002.

    >>> bits_for(250_002)
    18
    """
    return max(1, (size - 1).bit_length())


def pack(array: jax.Array, bits: int) -> jax.Array:
    """Packs [...] integers: [ceil(size * bits / 8)] uint8; higher bits are dropped."""
    return jax.lax.platform_dependent(
        array.reshape(-1).astype(jnp.uint32),
        cpu=functools.partial(_pack_words, bits=bits),
        default=functools.partial(_pack_bits, bits=bits),
    )


def unpack(data: jax.Array, size: int, bits: int) -> jax.Array:
    """Unpacks [ceil(size * bits / 8)] uint8: [size] uint32."""
    return jax.lax.platform_dependent(
        data,
        cpu=functools.partial(_unpack_words, size=size, bits=bits),
        default=functools.partial(_unpack_bits, size=size, bits=bits),
    )


def unpack_on_host(data: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Unpacks [ceil(size * bits / 8)] uint8 with NumPy: [size] uint64."""
    start = np.arange(size) * bits
    first, shift = start // 8, (start % 8).astype(np.uint64)
    many = math.ceil((bits + 7) / 8)  # bytes that an integer may reach into
    data = np.pad(data, (0, many)).astype(np.uint64)
    words = sum(data[first + i] << np.uint64(8 * i) for i in range(many))
    return (words >> shift) & np.uint64((1 << bits) - 1)


def _pack_bits(ids: jax.Array, bits: int) -> jax.Array:
    table = (ids[:, None] >> jnp.arange(bits, dtype=jnp.uint32)[None]) & 1
    return jnp.packbits(table.astype(jnp.uint8).reshape(-1), bitorder="little")


def _unpack_bits(data: jax.Array, size: int, bits: int) -> jax.Array:
    table = jnp.unpackbits(data, count=size * bits, bitorder="little")
    table = table.reshape(size, bits).astype(jnp.uint32)
    shifts = jnp.arange(bits, dtype=jnp.uint32)
    return jnp.sum(table << shifts[None], axis=1, dtype=jnp.uint32)


def _pack_words(ids: jax.Array, bits: int) -> jax.Array:
    """Returns the same bytes as `_pack_bits`."""
    size = ids.size
    ids = jnp.pad(ids, (0, -size % WORD)).reshape(-1, WORD)
    words = _bitmap(ids) if bits == 1 else _pack(ids, bits)
    packed = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return packed.reshape(-1)[: math.ceil(size * bits / 8)]


def _unpack_words(data: jax.Array, size: int, bits: int) -> jax.Array:
    """Returns the same integers as `_unpack_bits`."""
    words = to_words(data, math.ceil(size / WORD) * bits).reshape(-1, bits)
    word, shift = np.divmod(np.arange(WORD) * bits, WORD)
    ids = _columns(words, word) >> shift.astype(np.uint32)[None]
    # An id that began in one word goes on in the next.
    rest = _columns(words, word + 1) << ((WORD - shift) % WORD).astype(np.uint32)[None]
    ids = ids | jnp.where((shift + bits > WORD)[None], rest, 0)
    return (ids & jnp.uint32((1 << bits) - 1)).reshape(-1)[:size]


def _pack(ids: jax.Array, bits: int) -> jax.Array:
    """Packs [rows, 32] integers into [rows, bits] uint32."""
    ids = ids & jnp.uint32((1 << bits) - 1)
    start = np.arange(bits) * WORD  # of each word, in bits
    first, last = start // bits, (start + WORD - 1) // bits  # ids in each word
    words = jnp.zeros((ids.shape[0], bits), jnp.uint32)
    for i in range(np.max(last - first) + 1):
        number = np.minimum(first + i, last)  # the last one again does no harm
        left = number * bits - start
        part = _columns(ids, number) << np.maximum(left, 0).astype(np.uint32)[None]
        words = words | (part >> np.maximum(-left, 0).astype(np.uint32)[None])
    return words


def _columns(table: jax.Array, which: np.ndarray) -> jax.Array:
    return jnp.take(table, which, axis=1, mode="clip")


def _bitmap(marks: jax.Array) -> jax.Array:
    """Packs [rows, 32] of 0 and 1 into [rows] uint32."""
    shifts = jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum((marks & 1) << shifts[None], axis=1, dtype=jnp.uint32)


def to_words(data: jax.Array, count: int) -> jax.Array:
    """Converts bytes to [count] uint32, zeros where there are no more bytes."""
    data = jnp.pad(data, (0, count * WORD // 8 - data.size))
    return jax.lax.bitcast_convert_type(data.reshape(count, WORD // 8), jnp.uint32)


def bitmap(marks: jax.Array) -> jax.Array:
    """Packs [n] bool into [ceil(n / 32)] uint32."""
    marks = jnp.pad(marks, (0, -marks.size % WORD)).reshape(-1, WORD)
    return _bitmap(marks.astype(jnp.uint32))


def count(words: jax.Array) -> jax.Array:
    """Counts a bitmap's marks, int32; on a CPU faster than summing booleans."""
    return jnp.sum(jax.lax.population_count(words).astype(jnp.int32))


def select(words: jax.Array, rank: jax.Array) -> jax.Array:
    """Finds the position of each word's set bit number `rank`, from 0, by halving."""
    words, rank = words.astype(jnp.uint32), rank.astype(jnp.uint32)
    position = jnp.zeros_like(words)
    for width in (16, 8, 4, 2, 1):
        below = jax.lax.population_count(words & jnp.uint32((1 << width) - 1))
        above = rank >= below
        words = jnp.where(above, words >> width, words)
        rank = jnp.where(above, rank - below, rank)
        position = position + jnp.where(above, jnp.uint32(width), jnp.uint32(0))
    return position


def positions(words: jax.Array, count: int) -> jax.Array:
    """Returns [count] int32, positions of a bitmap's first `count` marks, ascending.

    By prefix sums over words rather than bits, so 32 times shorter than those of
    `jnp.nonzero`, which are most of its time. Beyond the last mark, positions are
    arbitrary.
    """
    marks = jax.lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(marks) - marks  # marks ahead of each word
    number = jnp.arange(words.size, dtype=jnp.int32)
    # Each slot's word: every word that has marks writes its number at its first slot.
    starts = jnp.where(marks > 0, before, count)
    word = jnp.zeros(count, jnp.int32).at[starts].set(number, mode="drop")
    word = jax.lax.cummax(word)
    rank = jnp.arange(count, dtype=jnp.int32) - before[word]
    return word * WORD + select(words[word], rank).astype(jnp.int32)
