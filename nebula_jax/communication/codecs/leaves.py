"""Floating-point leaves of a tree: found, encoded in their place, and brought back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nebula_jax.communication import codec


def is_float(leaf: Any) -> bool:
    """Returns True if a leaf, or its spec, is of a floating-point type."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def encode(encode_leaf: Callable[[Any], Any], arrays: codec.Arrays) -> codec.Payload:
    """Puts `encode_leaf(leaf)` in the place of every floating-point leaf."""
    return jax.tree.map(
        lambda leaf: encode_leaf(leaf) if is_float(leaf) else leaf, arrays
    )


def decode(
    kind: type, decode_leaf: Callable[[Any], Any], payload: codec.Payload
) -> codec.Arrays:
    """Puts `decode_leaf(node)` in the place of every innermost node of type `kind`.

    Innermost, because the codec before in a chain may have been of the same kind: in
    `int8(row)|int8(tensor)` the scales of the first are encoded by the second, and the
    second must not take the first one's nodes for its own.
    """

    def is_node(node: Any) -> bool:
        return isinstance(node, kind) and all(
            jax.tree_util.treedef_is_leaf(child)
            for child in jax.tree_util.treedef_children(jax.tree.structure(node))
        )

    return jax.tree.map(
        lambda node: decode_leaf(node) if isinstance(node, kind) else node,
        payload,
        is_leaf=is_node,
    )


def codec_of(
    kind: type,
    encode_leaf: Callable[[jax.Array], Any],
    decode_leaf: Callable[[Any], jax.Array],
    name: str,
) -> codec.Codec:
    """Makes a stateless codec of all floating-point leaves; others pass untouched.

    Args:
      kind: type of the nodes that `encode_leaf` makes.
      encode_leaf: array -> node.
      decode_leaf: node -> array.
      name: of the codec, with its arguments.
    """
    return codec.stateless(
        lambda arrays: encode(encode_leaf, arrays),
        lambda payload: decode(kind, decode_leaf, payload),
        name,
    )


def floats(arrays: codec.Arrays) -> list[Any]:
    """Returns the floating-point leaves, in order."""
    return [leaf for leaf in jax.tree.leaves(arrays) if is_float(leaf)]


def with_floats(arrays: codec.Arrays, new: list[jax.Array]) -> codec.Arrays:
    """Replaces the floating-point leaves, each cast to the old one's dtype."""
    remaining = iter(new)
    return encode(lambda leaf: next(remaining).astype(leaf.dtype), arrays)


def named(arrays: codec.Arrays, name: str) -> Any:
    """Returns the leaf with that dict key or attribute.

    Raises:
      ValueError: if there is none, or more than one.
    """
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
        if _is_called(path, name)
    ]
    if len(found) != 1:
        raise ValueError(f"one leaf must be called {name!r}; {len(found)} are")
    return found[0]


def replace_named(arrays: codec.Arrays, name: str, new: Any) -> codec.Arrays:
    """Replaces the leaf of that name by `new`, or by None; also in None's place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: new if _is_called(path, name) else leaf,
        arrays,
        is_leaf=lambda node: node is None,
    )


def _is_called(path: tuple, name: str) -> bool:
    last = path[-1] if path else None
    return name in (getattr(last, "key", None), getattr(last, "name", None))
