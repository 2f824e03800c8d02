"""Checks of what a peer sent, on the host, before it is used.

A decoder would go on: JAX clamps an index that is out of range, or drops what it names,
and an id outside the vocabulary becomes NaN. Nodes of a payload that can hold such a
value check themselves (`Checked`).
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@runtime_checkable
class Checked(Protocol):
    """A node of a payload that checks what its arrays hold."""

    def check_values(self) -> None:
        """Raises ValueError if some value cannot be; the arrays are NumPy's."""


def check_payload(payload: Any) -> None:
    """Raises ValueError with leaf, value and range at a wrong bool or Checked node."""
    for path, node in _parts(payload, ()):
        try:
            if isinstance(node, Checked):
                node.check_values()
            elif node.dtype == np.bool_:
                check_range(node.view(np.uint8), 0, 2)
        except ValueError as error:
            # Without the wrapper of a codec's leaves (`codecs.leaves.Encoded`).
            path = tuple(key for key in path if getattr(key, "name", "") != "tree")
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _parts(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields paths and nodes: those that are Checked at any depth, and leaves."""
    if isinstance(tree, Checked):
        yield path, tree
    below, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree and isinstance(node, Checked)
    )
    for rest, node in below:
        if isinstance(node, Checked):
            yield from _parts(node, path + rest)
        else:
            yield path + rest, node


def check_range(values: Any, low: int, high: int) -> None:
    """Raises ValueError at a value of an integer array that is not in [low, high)."""
    values = np.asarray(values)
    if not values.size:
        return
    for value in (int(values.min()), int(values.max())):
        if not low <= value < high:
            raise ValueError(f"{value} is not in [{low}, {high})")


def check_finite(values: Any) -> None:
    """Raises ValueError at a NaN or Inf in a floating-point array."""
    values = np.asarray(values)
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{values[~np.isfinite(values)][0]} is not finite")
