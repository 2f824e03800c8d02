"""Devices of one cluster as a mesh with axes `data` and `model`; where arrays go.

A batch is split over `data`. A parameter is split over `model` by the first of RULES
whose pattern is found in its path, and so are its optimizer moments, whose paths end
alike. An axis that does not divide is left whole.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax import errors

BATCH = PartitionSpec("data")  # the first axis split over `data`
REPLICATED = PartitionSpec()  # a copy on every device

Rules = Sequence[tuple[str, PartitionSpec]]

# V vocabulary, D width, H heads, K head width, F feed-forward (Megatron-LM's cut).
ENCODER_RULES: Rules = (
    (r"word_embeddings/embedding$", PartitionSpec("model", None)),  # [V, D]
    (r"attention/(query|key|value)/kernel$", PartitionSpec(None, "model", None)),
    (r"attention/(query|key|value)/bias$", PartitionSpec("model", None)),  # [H, K]
    (r"attention/output/kernel$", PartitionSpec("model", None, None)),  # [H, K, D]
    (r"intermediate/kernel$", PartitionSpec(None, "model")),  # [D, F]
    (r"intermediate/bias$", PartitionSpec("model")),  # [F]
    (r"layer_\d+/output/kernel$", PartitionSpec("model", None)),  # [F, D]
)


def make_mesh(devices: Sequence[jax.Device], model_parallel: int = 1) -> Mesh:
    """Makes a mesh of len(devices)/model_parallel by model_parallel devices.

    Raises:
      errors.NebulaError: if model_parallel does not divide the number of devices.
    """
    if len(devices) % model_parallel:
        raise errors.NebulaError(
            f"--model_parallel={model_parallel} does not divide {len(devices)} devices"
        )
    grid = np.asarray(devices).reshape(-1, model_parallel)
    return Mesh(grid, ("data", "model"))


def state_sharding(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """Finds the NamedSharding of every leaf of a state.

    Args:
      mesh: of this cluster.
      rules: (pattern, PartitionSpec), first match wins; no match means a copy on
        every device.
      tree: arrays or ShapeDtypeStructs.

    Returns:
      The tree with shardings as leaves.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                return NamedSharding(mesh, _that_divides(mesh, spec, leaf.shape))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _that_divides(
    mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]
) -> PartitionSpec:
    return PartitionSpec(
        *(
            axis if axis is None or size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape, strict=True)
        )
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the first axis split over `data`."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a copy on every device."""
    return NamedSharding(mesh, REPLICATED)


def jit_step(
    step: Callable[..., Any],
    *states: Any,
    inputs: Sequence[Any] = (BATCH,),
    outputs: Sequence[Any] = (REPLICATED,),
    donate: bool = True,
) -> Callable[..., Any]:
    """Compiles a training step with explicit shardings, its states updated in place.

        train = jit_step(functools.partial(m3.discriminator_step, config), sharding)
        state, metrics = train(state, tokens)

    A function without a state needs no more than `jax.jit(fn, out_shardings=...)`.

    Args:
      step: (*states, *inputs) -> (*states, *outputs); or the next state alone, if
        there is one state and no output.
      states: a tree of NamedShardings for each state, on one mesh (`state_sharding`,
        `ShardedInit.sharding`).
      inputs: for each other argument a PartitionSpec, for all of its leaves, or a tree
        of NamedShardings.
      outputs: for each other result, likewise.
      donate: whether the arrays of the states given are used up.

    Returns:
      The jitted step.
    """
    mesh = jax.tree.leaves(states)[0].mesh

    def on_mesh(spec: Any) -> Any:
        return NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec

    results = (*states, *map(on_mesh, outputs))
    return jax.jit(
        step,
        in_shardings=(*states, *map(on_mesh, inputs)),
        out_shardings=results if len(results) > 1 else results[0],
        donate_argnums=range(len(states)) if donate else (),
    )


class ShardedInit(NamedTuple):
    """A state that is yet to be made, already sharded.

    init: () -> the state at step 0, on its devices.
    shapes: the state's tree of ShapeDtypeStructs.
    sharding: the state's tree of NamedShardings.
    """

    init: Callable[[], Any]
    shapes: Any
    sharding: Any


def sharded_init(
    mesh: Mesh, init: Callable[[], Any], rules: Rules = ENCODER_RULES
) -> ShardedInit:
    """Plans a state that is computed in place: no device holds more than its shards.

    Args:
      mesh: of this cluster.
      init: makes the state; is jitted.
      rules: see `state_sharding`.
    """
    shapes = jax.eval_shape(init)
    sharding = state_sharding(mesh, rules, shapes)
    return ShardedInit(jax.jit(init, out_shardings=sharding), shapes, sharding)


def sharded_init_from_arrays(
    mesh: Mesh, init: Callable[[], Any], rules: Rules = ENCODER_RULES
) -> ShardedInit:
    """Plans a state that is built from existing arrays.

    Unlike in `sharded_init`, `init` is not jitted: XLA would embed the arrays in the
    program as constants. The arrays are copied, so that a step may donate the state.

    Args:
      mesh: of this cluster.
      init: makes the state.
      rules: see `state_sharding`.
    """
    shapes = jax.eval_shape(init)
    sharding = state_sharding(mesh, rules, shapes)

    def make() -> Any:
        return jax.device_put(jax.tree.map(jnp.copy, init()), sharding)

    return ShardedInit(make, shapes, sharding)


def sharded_init_with_codecs(
    state: ShardedInit, mesh: Mesh, codecs: list[Any]
) -> ShardedInit:
    """Plans {"state", "codecs"}: a state with the states of its channels' codecs.

    Args:
      state: of the model.
      mesh: of this cluster.
      codecs: codec states at step 0; a copy on every device.
    """
    everywhere = replicated(mesh)
    return ShardedInit(
        lambda: {"state": state.init(), "codecs": codecs},
        {"state": state.shapes, "codecs": jax.eval_shape(lambda: codecs)},
        {
            "state": state.sharding,
            "codecs": jax.tree.map(lambda leaf: everywhere, codecs),
        },
    )
