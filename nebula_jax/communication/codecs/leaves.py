"""Floating-point leaves of a tree: found, encoded in their place, and brought back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec


def is_float(leaf: Any) -> bool:
    """Returns True if a leaf, or its spec, is of a floating-point type."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def encode(encode_leaf: Callable[[Any], Any], arrays: codec.Arrays) -> codec.Payload:
    """Puts `encode_leaf(leaf)` in the place of every floating-point leaf."""
    return jax.tree.map(
        lambda leaf: encode_leaf(leaf) if is_float(leaf) else leaf, arrays
    )


@struct.dataclass
class Encoded:
    """A payload of `per_leaf`: arrays, with a payload in the place of each encoded one.

    leaves: shape and dtype of each leaf that is encoded, None of others.
    """

    tree: Any
    structure: Any = struct.field(pytree_node=False)  # of the arrays
    leaves: tuple[tuple[tuple[int, ...], str] | None, ...] = struct.field(
        pytree_node=False
    )


def per_leaf(
    encode: Callable[[jax.Array], Any],
    decode: Callable[[Any, jax.ShapeDtypeStruct], jax.Array],
    name: str = codec.UNNAMED,
) -> codec.Codec:
    """Makes a codec of all floating-point leaves from two functions of one array.

    Other leaves, and those without values, cross as they are. A scalar is encoded as
    one row of one value, [1].

    >>> halved = per_leaf(lambda x: x / 2, lambda payload, like: payload * 2)
    >>> payload, _ = halved.encode({"h": jnp.ones((2, 3)), "n": jnp.int32(7)}, ())
    >>> halved.decode(payload, ())[0]["h"].tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]

    Args:
      encode: array -> payload, any pytree of arrays; pure, and its shapes depend on the
        array's shape alone. Where the array has NaN or Inf, so must what is decoded
        have: a value that others are measured by, such as a scale, becomes NaN.
      decode: (payload, like) -> array of `like.shape`; cast to `like.dtype`, which are
        the leaf's.
      name: with its arguments, such as "signs(4)"; by it two clusters notice that their
        codecs differ. A codec string gives one by itself.
    """

    def encode_all(arrays: codec.Arrays) -> Encoded:
        found, structure = jax.tree.flatten(arrays)
        payloads = list(found)
        about: list[tuple[tuple[int, ...], str] | None] = [None] * len(found)
        for i, leaf in enumerate(found):
            if is_float(leaf) and leaf.size:
                payloads[i] = encode(jnp.atleast_1d(leaf))
                about[i] = leaf.shape, str(leaf.dtype)
        return Encoded(jax.tree.unflatten(structure, payloads), structure, tuple(about))

    def decode_all(payload: Encoded) -> codec.Arrays:
        parts = payload.structure.flatten_up_to(payload.tree)
        for i, about in enumerate(payload.leaves):
            if about is not None:
                shape, dtype = about
                like = jax.ShapeDtypeStruct(shape or (1,), dtype)
                leaf = decode(parts[i], like).astype(dtype)
                parts[i] = leaf if leaf.shape != (1,) else leaf.reshape(shape)
        return jax.tree.unflatten(payload.structure, parts)

    return codec.stateless(encode_all, decode_all, name)


def floats(arrays: codec.Arrays) -> list[Any]:
    """Returns the floating-point leaves, in order."""
    return [leaf for leaf in jax.tree.leaves(arrays) if is_float(leaf)]


def with_floats(arrays: codec.Arrays, new: list[jax.Array]) -> codec.Arrays:
    """Replaces the floating-point leaves, each cast to the old one's dtype."""
    remaining = iter(new)
    return encode(lambda leaf: next(remaining).astype(leaf.dtype), arrays)
