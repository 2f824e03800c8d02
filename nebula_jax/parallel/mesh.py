"""Devices of one cluster as a mesh; steps compiled for it, and arrays put on it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax import errors
from nebula_jax.models import activations
from nebula_jax.parallel import rules as rules_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES, Rules


def make_mesh(
    devices: Sequence[jax.Device], fsdp: int = 1, model_parallel: int = 1
) -> Mesh:
    """Makes a mesh with axes `rules.AXES`, `data` what is left; raises as `check`."""
    check(len(devices), fsdp, model_parallel)
    grid = np.asarray(devices).reshape(-1, fsdp, model_parallel)
    return Mesh(grid, activations.AXES)


def check(devices: int, fsdp: int, model_parallel: int) -> None:
    """Raises errors.SettingsError, with what could, if these devices do not divide."""
    groups = devices // model_parallel
    for flag, wanted, what, there in (
        ("model_parallel", model_parallel, "devices", devices),
        ("fsdp", fsdp, f"groups of model_parallel={model_parallel} devices", groups),
    ):
        if there % wanted:
            nearest = rules_lib.nearest_divisor(there, wanted)
            raise errors.SettingsError(
                f"{flag}={wanted} does not divide the cluster's {there} {what};"
                f" {nearest} does"
            )


def replicas(mesh: Mesh) -> int:
    """Returns among how many groups of devices a batch is split."""
    return activations.devices(mesh, activations.ROWS)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the first axis split over `data` and `fsdp`."""
    return NamedSharding(mesh, BATCH)


def rows_here(mesh: Mesh, batch_size: int) -> slice:
    """Returns which rows of a batch lie on the devices of this process."""
    shards = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    rows = [index[0].indices(batch_size) for index in shards.values() if index]
    return slice(min(begin for begin, _, _ in rows), max(end for _, end, _ in rows))


def put_rows(mesh: Mesh, rows: Any, batch_size: int) -> Any:
    """Puts a batch [B, ...] on the devices; each process gives [rows_here, ...]."""
    where = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(rows, where)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(
            where, leaf, (batch_size, *leaf.shape[1:])
        ),
        rows,
    )


def put(arrays: Any, where: Any) -> Any:
    """Puts arrays, whole in each process, at NamedShardings: a tree, or one for all."""
    if jax.process_count() == 1:
        return jax.device_put(arrays, where)
    return jax.tree.map(
        lambda leaf, at: jax.make_array_from_callback(
            np.shape(leaf), at, lambda index: np.asarray(leaf)[index]
        ),
        arrays,
        jax.tree.broadcast(where, arrays),
    )


def place(array: jax.Array, where: NamedSharding) -> jax.Array:
    """Moves an array between layouts on the devices, by the cluster's collectives."""
    return jax.jit(_same, out_shardings=where)(array)


def _same(array: jax.Array) -> jax.Array:
    return array


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a copy on every device."""
    return NamedSharding(mesh, REPLICATED)


def jit_step(
    step: Callable[..., Any],
    mesh: Mesh,
    rules: Rules,
    *states: Any,
    inputs: Sequence[Any] = (BATCH,),
    outputs: Sequence[Any] = (REPLICATED,),
) -> Callable[..., Any]:
    """Compiles a training step with explicit shardings, its states updated in place.

        train = jit_step(functools.partial(m3_steps.discriminator_step, config),
                         mesh, RULES, fresh.shapes)
        state, metrics = train(state, tokens)

    `step` takes (*states, *inputs) and returns (*states, *outputs). Each of `states` is
    a tree of arrays or ShapeDtypeStructs; each of `inputs` and `outputs` a
    PartitionSpec for all leaves, or a tree of NamedShardings. A function without a
    state needs no more than `jax.jit(fn, out_shardings=...)`. Raises
    errors.SettingsError if the mesh's `model` axis does not divide what it splits.
    """
    placed = [rules_lib.shardings(mesh, rules, state) for state in states]

    def on_mesh(spec: Any) -> Any:
        return NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec

    return jax.jit(
        activations.on(mesh, step),
        in_shardings=(*placed, *map(on_mesh, inputs)),
        out_shardings=(*placed, *map(on_mesh, outputs)),
        donate_argnums=range(len(states)),
    )


class ShardedInit(NamedTuple):
    """A state that is yet to be made, already sharded."""

    init: Callable[[], Any]  # makes the state at step 0, on its devices
    shapes: Any  # the state's tree of ShapeDtypeStructs
    sharding: Any  # the state's tree of NamedShardings


def sharded_init(mesh: Mesh, init: Callable[..., Any], *given: Any) -> ShardedInit:
    """Plans the state `init(*given)`, jitted: no device holds more than its shards."""
    shapes = jax.eval_shape(init, *given)
    sharding = rules_lib.shardings(mesh, RULES, shapes)
    jitted = jax.jit(init, out_shardings=sharding)
    return ShardedInit(lambda: jitted(*given), shapes, sharding)


def sharded_init_from_arrays(mesh: Mesh, init: Callable[[], Any]) -> ShardedInit:
    """Plans a state that is built from existing arrays.

    Unlike in `sharded_init`, `init` is not jitted: XLA would embed the arrays in the
    program as constants. The arrays are copied, so that a step may donate the state.
    """
    shapes = jax.eval_shape(init)
    sharding = rules_lib.shardings(mesh, RULES, shapes)

    def make() -> Any:
        return put(jax.tree.map(jnp.copy, init()), sharding)

    return ShardedInit(make, shapes, sharding)


def sharded_init_with_codecs(
    state: ShardedInit, mesh: Mesh, codecs: list[Any]
) -> ShardedInit:
    """Plans {"state", "codecs"}: codec states at step 0, a copy on every device."""
    everywhere = replicated(mesh)
    return ShardedInit(
        lambda: {"state": state.init(), "codecs": put(codecs, everywhere)},
        {"state": state.shapes, "codecs": jax.eval_shape(lambda: codecs)},
        {
            "state": state.sharding,
            "codecs": jax.tree.map(lambda leaf: everywhere, codecs),
        },
    )
