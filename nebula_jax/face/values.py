"""Values of a user's loop in a checkpoint: any pytree, leaf by leaf, by its path."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nebula_jax import errors
from nebula_jax.parallel import mesh as mesh_lib

_PLAIN = (bool, int, float)


class ValueUnsaved(errors.SettingsError):
    """A value that cannot be saved; the text names its place."""


def arrays(values: Any) -> dict[str, Any]:
    """Returns the leaves of values as arrays that a checkpoint takes.

    A pytree of arrays, keys of `jax.random`, and Python numbers, as
    `0007 params/layers/0/kernel` -> array.

    Raises:
      ValueUnsaved: at a leaf of another type.
    """
    found = {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(values)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf = without_key(leaf)
        if isinstance(leaf, _PLAIN):
            leaf = np.asarray(leaf)
        elif not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise ValueUnsaved(
                f"value {name} is of type {type(leaf).__name__}: run.restore and"
                " run.done take arrays, keys of jax.random, numbers, and trees of them;"
                " leave it out of what you pass, or mark it as static"
            )
        # A slash would be a folder to what writes checkpoints.
        found[f"{number:04d} {name.replace('/', '.')}"] = leaf
    return found


def without_key(leaf: Any) -> Any:
    """Returns the numbers of a key of `jax.random`; anything else as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def fresh(values: Any) -> mesh_lib.ShardedInit:
    """Returns values at step 0 as `Checkpoints.restore` takes them."""
    found = arrays(values)
    return mesh_lib.ShardedInit(
        lambda: found,
        {
            name: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
            for name, leaf in found.items()
        },
        {name: _sharding(leaf) for name, leaf in found.items()},
    )


def shapes(found: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the shape of each leaf that `arrays` has found, as JSON values."""
    return {
        name.partition(" ")[2]: list(np.shape(leaf)) for name, leaf in found.items()
    }


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the first leaf of which two `shapes` differ, in words; empty if none."""
    for name in [*one, *(each for each in other if each not in one)]:
        if one.get(name) != other.get(name):
            here, there = (each.get(name, "missing") for each in (one, other))
            return f"{name} is {here}, and was {there}"
    return ""


def _sharding(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.sharding
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def restored(values: Any, found: dict[str, Any]) -> Any:
    """Puts saved arrays, by the names of `arrays`, into the places of like values."""
    leaves, structure = jax.tree.flatten(values)
    saved: Sequence[Any] = [found[name] for name in sorted(found)]
    return jax.tree.unflatten(
        structure, [_like(old, new) for old, new in zip(leaves, saved, strict=True)]
    )


def _like(old: Any, new: Any) -> Any:
    if isinstance(old, _PLAIN):
        return type(old)(new)
    if _is_key(old):
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    if isinstance(old, jax.Array):
        return new
    return np.asarray(new)
