"""The arrays that a front half keeps for its backward pass, without its arguments."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct


@struct.dataclass
class Residuals:
    """The arrays that the front's backward pass needs of its forward pass.

    `kept` has a weight only if the model multiplies by a cast of it, such as to
    bfloat16. `given` are places of residuals that are arguments of the forward pass as
    they are (most of them weights): they are given again instead of being copied.
    """

    kept: list[jax.Array]
    given: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    structure: Any = struct.field(pytree_node=False)  # of the pullback of all of them


def of(pullback: Any, arguments: Any) -> Residuals:
    """Returns the residuals of a pullback, without those that are arguments."""
    values, structure = jax.tree.flatten(pullback)
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
    given = [(n, places[id(v)]) for n, v in enumerate(values) if id(v) in places]
    kept = [value for value in values if id(value) not in places]
    return Residuals(kept, tuple(given), structure)


def pullback(residuals: Residuals, arguments: Any) -> Callable:
    """Inverts `of`, given the same arguments again."""
    again = jax.tree.leaves(arguments)
    given = {place: again[number] for place, number in residuals.given}
    kept = iter(residuals.kept)
    count = len(residuals.given) + len(residuals.kept)
    values = [given[n] if n in given else next(kept) for n in range(count)]
    return jax.tree.unflatten(residuals.structure, values)
