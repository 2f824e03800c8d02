"""Counts of a model that is only traced: parameters, FLOPs, bytes. No weights are made.

FLOPs are those of the matrix products, 2 m n k each: what else a step computes is of
lower order, and is part of a device's *sustained* speed.

B rows of a batch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from nebula_jax.communication import codec
from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules


@dataclasses.dataclass(frozen=True)
class Half:
    """One cluster's part of the model as shapes, and what a step computes of it."""

    name: str
    """generators or discriminator."""
    trained: Any
    """Parameters, ShapeDtypeStructs."""
    kept: Any
    """All that its devices hold from step to step, and gradients that are added up."""
    loss: Callable[..., Any]
    """(trained, *inputs) -> (scalar, anything)."""
    inputs: Callable[[int], tuple[Any, ...]]
    """Number of rows -> ShapeDtypeStructs."""
    rows: int
    """Rows of a micro-batch on the line."""
    at_once: float
    """Rows that a step differentiates together."""

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """Returns the shapes of the arguments of `loss`."""
        return self.trained, *self.inputs(rows)

    @property
    def gradient(self) -> Callable[..., Any]:
        """The gradient of `loss` in the parameters."""
        return jax.grad(self.loss, has_aux=True)


@dataclasses.dataclass(frozen=True)
class Part:
    """One cluster's part of the model, and what a micro-batch takes of it."""

    name: str
    trained: int
    """Parameters."""
    forward: float
    """FLOP of a micro-batch on the line."""
    backward: float
    """FLOP of a micro-batch on the line."""
    state_bytes: float
    """Bytes of one device: parameters, optimizer, gradients."""
    working_bytes: float
    """Bytes of one device: activations that wait for the backward pass."""


def part(half: Half, devices: int, fsdp: int, model_parallel: int) -> Part:
    """Counts a part.

    Args:
      half: of the model.
      devices: of the cluster.
      fsdp, model_parallel: as the flags of the mesh.

    Raises:
      errors.SettingsError: if they do not divide the devices.
    """
    mesh_lib.check(devices, fsdp, model_parallel)
    grid = devices // (fsdp * model_parallel), fsdp, model_parallel
    arguments = half.arguments(half.rows)
    forward = flops(half.loss, *arguments)
    of_device = half.at_once / (grid[0] * grid[1])
    return Part(
        half.name,
        parameters(half.trained),
        forward,
        flops(half.gradient, *arguments) - forward,
        bytes_on_device(half.kept, grid),
        _activations(half, of_device) / model_parallel,
    )


def flops(fn: Callable[..., Any], *shapes: Any) -> float:
    """Counts the FLOPs of a function's matrix products.

    Args:
      fn: pure; its loops have a known length.
      shapes: of its arguments, ShapeDtypeStructs.
    """
    return _flops(jax.make_jaxpr(fn)(*shapes).jaxpr)


def _flops(jaxpr: core.Jaxpr) -> float:
    total = 0.0
    for each in jaxpr.eqns:
        if each.primitive.name == "dot_general":
            (contracted, _), _ = each.params["dimension_numbers"]
            left = each.invars[0].aval.shape
            inner = math.prod(left[axis] for axis in contracted)
            total += 2.0 * inner * math.prod(each.outvars[0].aval.shape)
        times = each.params["length"] if each.primitive.name == "scan" else 1
        total += times * sum(map(_flops, _inner(each)))
    return total


def _inner(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the programs that an equation runs; of branches, the first."""
    for name, value in equation.params.items():
        values = value[:1] if name == "branches" else (value,)
        for each in values if isinstance(values, tuple) else ():
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def parameters(tree: Any) -> int:
    """Counts the values of a tree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def bytes_on_device(tree: Any, grid: tuple[int, int, int]) -> float:
    """Returns how much of a state each device holds.

    Args:
      tree: of ShapeDtypeStructs.
      grid: devices along `activations.AXES`.

    Raises:
      errors.SettingsError: if the `model` axis does not divide what it splits.
    """
    mesh = jax.sharding.AbstractMesh(grid, activations.AXES)
    places = rules.shardings(mesh, rules.RULES, tree)
    shards = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            place.shard_shape(leaf.shape), leaf.dtype
        ),
        tree,
        places,
    )
    return float(codec.nbytes(_plain(shards)))


def _plain(tree: Any) -> list[Any]:
    """Returns the leaves that have bytes: keys of random numbers are small."""
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]


def _activations(half: Half, rows: float) -> float:
    """Returns the bytes that wait for the backward pass of so many rows.

    A residual is counted as it is traced: the compiler may keep less.
    """

    def kept(count: int) -> float:
        def pull(trained: Any, *others: Any) -> Any:
            return jax.vjp(lambda own: half.loss(own, *others), trained, has_aux=True)[
                1
            ]

        leaves = _plain(jax.eval_shape(pull, *half.arguments(count)))
        return float(codec.nbytes(leaves))

    few, many = kept(8), kept(16)
    per_row = (many - few) / 8
    # What does not grow with the rows is copies of parameters.
    return rows * per_row + max(0.0, few - 8 * per_row)
