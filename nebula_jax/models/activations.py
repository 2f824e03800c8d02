"""The places of a model's activations on a mesh of devices.

A model names the mesh axes of its activations with `place`. That does nothing unless
the function around it is wrapped by `on`: then parameters come to the activations that
need them, where the compiler alone might exchange activations instead.
"""

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, FSDP, MODEL = AXES = ("data", "fsdp", "model")  # see `parallel.rules`
ROWS = (DATA, FSDP)  # the axes among which the examples of a batch are split

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "mesh", default=None
)


def on(mesh: Mesh | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to be traced, so that its activations lie on `mesh`, if any."""

    @functools.wraps(fn)
    def placed(*args: Any, **kwargs: Any) -> Any:
        token = _mesh.set(mesh)
        try:
            return fn(*args, **kwargs)
        finally:
            _mesh.reset(token)

    return placed


def mesh() -> Mesh | None:
    """Returns the mesh that is in use, if any."""
    return _mesh.get()


def place(array: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Splits an activation, or a whole parameter, over axes of the mesh in use, if any.

    For each axis of the array: a mesh axis, several, or None. Those not given are
    whole, and so are those that do not divide.
    """
    mesh = _mesh.get()
    if mesh is None:
        return array
    spec = [
        axis if size % devices(mesh, axis) == 0 else None
        for size, axis in zip(array.shape, axes, strict=False)
    ]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(array, sharding)


def devices(mesh: Mesh, axis: str | tuple[str, ...] | None) -> int:
    """Returns among how many groups of devices an axis, or several, split an array."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh.shape[name] for name in names)
