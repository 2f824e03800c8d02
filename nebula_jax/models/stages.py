"""Layers as the stages of a pipeline, for encoders too deep for one device (GPipe).

The devices of an fsdp group split the parameters between them at rest. Without a
pipeline each gathers every layer when it is used; with one, each gets its own run of
layers whole, and micro-batches go from device to device. All that leaves a device are
activations at its last layer.

B rows of a group, M micro-batches, S stages, N layers, D width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from nebula_jax import errors
from nebula_jax.models import activations
from nebula_jax.models.activations import DATA, FSDP, MODEL, ROWS

# (parameters, hidden [b, Q, D], attention mask, key or None) -> hidden.
Layer = Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]


def apply(
    block: Callable[..., Any],
    params: Sequence[Any],
    hidden: jax.Array,
    attention_mask: jax.Array,
    deterministic: bool,
    rng: jax.Array | None,
    micro_batches: int,
    remat: bool,
    mesh: Mesh,
) -> jax.Array:
    """Applies layers as a pipeline over the mesh's axis `fsdp`: [rows, Q, D] float32.

    Raises errors.SettingsError if layers or rows do not divide, or there is no group.

    Args:
      block: applies a layer, as `nn.Module.apply` does; the same for all.
      params: N trees, one for each layer.
      hidden: [rows, Q, D] float32, split over `data` and `fsdp`.
      attention_mask: bool, [rows, ...], split alike.
      rng: key of the step; None to draw nothing. Each layer of each micro-batch draws
        from a key of its own.
      micro_batches: M, of a group's rows.
      remat: whether a layer's activations are computed again for its gradient.
    """
    count = mesh.shape[FSDP]
    _check(len(params), hidden.shape[0] // mesh.shape[DATA], micro_batches, mesh)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    rows, stages = PartitionSpec(ROWS), PartitionSpec(FSDP)
    key = None if rng is None else jax.random.key_data(rng)

    def layer(own: Any, hidden: jax.Array, mask: jax.Array, rng: Any) -> jax.Array:
        rngs = {} if rng is None else {"dropout": rng}
        return block({"params": own}, hidden, mask, deterministic, rngs=rngs)

    applied = jax.checkpoint(layer) if remat else layer
    run = functools.partial(_stages, applied, count, micro_batches)
    pipeline = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(stages, rows, rows, PartitionSpec()),
        out_specs=rows,
        check_vma=False,  # custom gradients (`mixed_precision`) have no such types
    )
    # The places of activations are this file's.
    return activations.on(None, pipeline)(stacked, hidden, attention_mask, key)


def _check(layers: int, rows: int, micro_batches: int, mesh: Mesh) -> None:
    stages = mesh.shape[FSDP]
    if stages == 1 or mesh.shape[MODEL] > 1:
        raise errors.SettingsError(
            f"pipeline={micro_batches} needs fsdp=S with S stages, and"
            f" model_parallel=1; there are fsdp={stages} and"
            f" model_parallel={mesh.shape[MODEL]}"
        )
    if layers % stages:
        raise errors.SettingsError(
            f"pipeline: {layers} layers do not divide over fsdp={stages} stages"
        )
    if rows % micro_batches:
        raise errors.SettingsError(
            f"pipeline={micro_batches} does not divide the {rows} rows of a group of"
            f" fsdp={stages} devices"
        )


def _stages(
    layer: Layer,
    count: int,
    micro_batches: int,
    params: Any,
    hidden: jax.Array,
    attention_mask: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    """Runs one device's layers on every micro-batch of its group, in their turn.

    `params` are a tree of [N / S, ...]; hidden and mask this device's [B / S, ...].
    """
    me = jax.lax.axis_index(FSDP)
    hidden, mask = (
        _whole(each, me, count).reshape(micro_batches, -1, *each.shape[1:])
        for each in (hidden, attention_mask.astype(jnp.int32))
    )
    layers = len(jax.tree.leaves(params)[0])
    numbers = me * layers + jnp.arange(layers)

    def own_layers(now: jax.Array, number: jax.Array) -> jax.Array:
        def one(now: jax.Array, given: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
            place, own = given
            return layer(own, now, mask[number] > 0, _key(key, number, place)), None

        return jax.lax.scan(one, now, (numbers, params))[0]

    def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
        now, done = carry
        number = jnp.clip(time - me, 0, micro_batches - 1)
        now = jnp.where(me == 0, hidden[number], now)
        now = own_layers(now, number)
        is_last = (me == count - 1) & (time >= me)
        done = jnp.where(is_last, done.at[number].set(now), done)
        ring = [(stage, (stage + 1) % count) for stage in range(count)]
        return (jax.lax.ppermute(now, FSDP, ring), done), None

    first, done = jnp.zeros_like(hidden[0]), jnp.zeros_like(hidden)
    ticks = jnp.arange(micro_batches + count - 1)
    (_, done), _ = jax.lax.scan(tick, (first, done), ticks)
    done = jax.lax.psum(jnp.where(me == count - 1, done, 0), FSDP)
    return done.reshape(count, -1, *done.shape[2:])[me]


def _whole(rows: jax.Array, me: jax.Array, count: int) -> jax.Array:
    """Brings the rows of all devices of a group to each, [S, B / S, ...]."""
    # By a sum, whose gradient is one too: reduce-scatter is not safe on CPUs.
    mine = jnp.arange(count).reshape(-1, *[1] * rows.ndim) == me
    return jax.lax.psum(jnp.where(mine, rows, 0), FSDP)


def _key(
    key: jax.Array | None, number: jax.Array, place: jax.Array
) -> jax.Array | None:
    """Returns the key of a layer for a micro-batch; groups draw apart."""
    if key is None:
        return None
    rng = jax.random.wrap_key_data(key)
    for each in (jax.lax.axis_index(DATA), number, place):
        rng = jax.random.fold_in(rng, each)
    return rng
