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
class Part:
    """One cluster's part of the model, and what a micro-batch takes of it."""

    name: str
    """generators, discriminator, source or target."""
    trained: int
    """Parameters."""
    frozen: int
    """Parameters."""
    forward: float
    """FLOP of a micro-batch on the line."""
    backward: float
    """FLOP of a micro-batch on the line."""
    memory: "Memory"
    """In one device."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes of a device, estimated or taken from a compiled step."""

    state: float
    """Parameters, optimizer, gradients."""
    working: float
    """Activations that wait for the backward pass, and what is under way."""
    is_compiled: bool = False

    @property
    def total(self) -> float:
        """The bytes of a device."""
        return self.state + self.working


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


def activations_of(
    loss: Callable[..., Any], params: Any, inputs: Callable[[int], Any]
) -> Callable[[float], float]:
    """Returns the bytes that wait for the backward pass, by the rows of a device.

    A residual is counted as it is traced: the compiler may keep less.

    Args:
      loss: (params, *inputs) -> (scalar, anything).
      params: tree of ShapeDtypeStructs.
      inputs: number of rows -> ShapeDtypeStructs.
    """

    def kept(count: int) -> float:
        def pull(params: Any, *inputs: Any) -> Any:
            return jax.vjp(lambda p: loss(p, *inputs), params, has_aux=True)[1]

        leaves = _plain(jax.eval_shape(pull, params, *inputs(count)))
        return float(codec.nbytes(leaves))

    few, many = kept(8), kept(16)
    per_row = (many - few) / 8
    # What does not grow with the rows is copies of parameters.
    return lambda rows: rows * per_row + max(0.0, few - 8 * per_row)


def grid_of(devices: int, fsdp: int, model_parallel: int) -> tuple[int, int, int]:
    """Returns how many devices each axis of a mesh has.

    Raises:
      errors.SettingsError: if they do not divide.
    """
    mesh_lib.check(devices, fsdp, model_parallel)
    return devices // (fsdp * model_parallel), fsdp, model_parallel
