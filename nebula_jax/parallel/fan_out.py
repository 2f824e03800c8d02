"""Fan-out (section 3.3, Fig. 6): a generator's step is n micro-batches, not one.

A generator is smaller than the discriminator, which therefore has several replicas: n
micro-batches keep them all busy, and the cluster synchronizes once for all. Each leaves
as soon as it is made; one step token comes back. B rows of a micro-batch, L length.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES
from nebula_jax.training import m3, m3_steps
from nebula_jax.training import state as train_state

Send = Callable[[m3.Tokens, int], None]  # takes a micro-batch [B, ...], its number
GeneratorStep = Callable[
    [train_state.TrainState, jax.Array, Send], tuple[train_state.TrainState, m3.Metrics]
]


def generator_step(
    config: m3.Config, mesh: Mesh, fresh: mesh_lib.ShardedInit
) -> GeneratorStep:
    """Compiles (state, [n B, L] int32, send) -> (state, metrics); uses state up."""
    if config.fan_out == 1:
        whole = mesh_lib.jit_step(
            functools.partial(m3_steps.generator_step, config),
            mesh,
            RULES,
            fresh.shapes,
            outputs=(BATCH, REPLICATED),
        )

        def step(state: Any, input_ids: Any, send: Send) -> Any:
            state, tokens, metrics = whole(state, input_ids)
            send(tokens, 0)
            return state, metrics

        return step

    one = mesh_lib.replicated(mesh)
    batch_at = mesh_lib.batch_sharding(mesh)
    rows: Any = NamedSharding(mesh, PartitionSpec(None, *BATCH))
    scalar: Any = one
    begun_at = m3_steps.Begun(rows, scalar, fresh.sharding.params, scalar, scalar)
    begin = jax.jit(
        activations.on(mesh, functools.partial(m3_steps.begin, config)),
        in_shardings=(fresh.sharding, batch_at),
        out_shardings=begun_at,
    )
    micro_batch = jax.jit(
        activations.on(mesh, functools.partial(m3_steps.micro_batch, config)),
        in_shardings=(fresh.sharding, begun_at, one),
        out_shardings=(begun_at, batch_at),
        donate_argnums=1,
    )
    finish = jax.jit(
        activations.on(mesh, functools.partial(m3_steps.finish, config)),
        in_shardings=(fresh.sharding, begun_at),
        out_shardings=(fresh.sharding, one),
        donate_argnums=0,
    )

    def step_in_pieces(state: Any, input_ids: Any, send: Send) -> Any:
        begun = begin(state, input_ids)
        for number in range(config.fan_out):
            begun, tokens = micro_batch(state, begun, np.int32(number))
            send(tokens, number)
        return finish(state, begun)

    return step_in_pieces
