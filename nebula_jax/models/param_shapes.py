"""Comparison of parameter trees by path and shape."""

from typing import Any

import jax

from nebula_jax import errors


def check(found: Any, expected: Any, found_name: str, expected_name: str) -> None:
    """Raises an error unless two trees have the same paths with the same shapes.

    Args:
      found: pytree of arrays or ShapeDtypeStructs.
      expected: likewise.
      found_name: subject of the error, such as `pretrained model`.
      expected_name: what it is compared with, such as `this configuration`.

    Raises:
      NebulaError: with the first path, in alphabetical order, that differs.
    """
    got, wanted = _shapes(found), _shapes(expected)
    for path in sorted(got.keys() | wanted.keys()):
        if got.get(path) != wanted.get(path):
            raise errors.NebulaError(
                f"{found_name}: {path} is {got.get(path, 'missing')};"
                f" {expected_name} has {wanted.get(path, 'no such parameter')}"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of every leaf."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
