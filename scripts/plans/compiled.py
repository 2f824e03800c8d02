"""Memory of a device from the compiled step: for simulated devices, without weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES, shardings
from nebula_jax.training import m3, m3_steps
from scripts.plans import abnet, count
from scripts.plans import m3 as m3_plan
from scripts.plans.settings import Settings


def simulate(settings: Settings) -> None:
    """Makes as many CPU devices as the larger cluster has; before JAX is used."""
    jax.config.update("jax_num_cpu_devices", max(settings.devices))


def memory(settings: Settings, side: str) -> count.Memory:
    """Compiles a side's step for its devices.

    Args:
      settings: of the plan.
      side: a name in the SIDES of the experiment's room.

    Returns:
      Arguments and results of the step, and what it needs besides, of one device. With
      abnet what waits for the backward pass is counted for every micro-batch under way.
    """
    is_m3 = settings.experiment == "m3"
    number = settings.devices[(m3_plan if is_m3 else abnet).SIDES.index(side)]
    local = settings.run.local
    mesh = mesh_lib.make_mesh(
        jax.devices("cpu")[:number], local.fsdp, local.model_parallel
    )
    lowered = (_m3 if is_m3 else _abnet)(settings, side, mesh)
    found = lowered.compile().memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    state, working = found.argument_size_in_bytes, found.temp_size_in_bytes
    if not is_m3:
        half = abnet.traced(settings, side)
        grid = tuple(mesh.shape[axis] for axis in activations.AXES)
        state += count.bytes_on_device(half.state.opt_state, grid)
        if side == "source":
            working *= abnet.most_in_flight(settings)
    return count.Memory(state + results, working, is_compiled=True)


def _m3(settings: Settings, side: str, mesh: Mesh) -> Any:
    agreed = settings.run.agreed
    config = m3_plan.model(settings.run, agreed.micro_batches)
    if side == "generators" and settings.run.agreed.fan_out > 1:
        return _micro_batch(settings, mesh)
    if side == "generators":
        fresh = mesh_lib.sharded_init(mesh, lambda: m3.init_generator(config, 0, 0))
        step, outputs = m3_steps.generator_step, (BATCH, REPLICATED)
        batch = m3_plan.ids(config, agreed.batch_size)
    else:
        fresh = mesh_lib.sharded_init(mesh, lambda: m3.init_discriminator(config, 0))
        step, outputs = m3_steps.discriminator_step, (REPLICATED,)
        one = m3.tokens_spec(config, agreed.batch_size)
        batch = [one] * (m3_plan.generators(settings.run) * settings.run.agreed.fan_out)
    compiled = mesh_lib.jit_step(
        functools.partial(step, config), mesh, RULES, fresh.shapes, outputs=outputs
    )
    return compiled.lower(fresh.shapes, batch)


def _micro_batch(settings: Settings, mesh: Mesh) -> Any:
    """Lowers the program of --fan_out that computes, as `parallel.fan_out` has it."""
    agreed, number = settings.run.agreed, settings.run.agreed.fan_out
    config = dataclasses.replace(
        m3_plan.model(settings.run, agreed.micro_batches), fan_out=number
    )
    fresh = mesh_lib.sharded_init(mesh, lambda: m3.init_generator(config, 0, 0))
    batch = m3_plan.ids(config, number * agreed.batch_size)
    begun = jax.eval_shape(
        functools.partial(m3_steps.begin, config), fresh.shapes, batch
    )
    one: Any = NamedSharding(mesh, REPLICATED)
    rows: Any = NamedSharding(mesh, PartitionSpec(None, *BATCH))
    begun_at = m3_steps.Begun(rows, one, fresh.sharding.params, one, one)
    micro_batch = jax.jit(
        activations.on(mesh, functools.partial(m3_steps.micro_batch, config)),
        in_shardings=(fresh.sharding, begun_at, one),
        out_shardings=(begun_at, NamedSharding(mesh, BATCH)),
        donate_argnums=1,
        keep_unused=True,  # the optimizer's state, which is on the device meanwhile
    )
    return micro_batch.lower(fresh.shapes, begun, jax.ShapeDtypeStruct((), jnp.int32))


def _abnet(settings: Settings, side: str, mesh: Mesh) -> Any:
    half = abnet.traced(settings, side)
    rows = abnet.rows(settings.run.agreed)
    inputs = half.inputs(rows)

    def place(leaf: Any) -> NamedSharding:
        is_batch = bool(leaf.shape) and leaf.shape[0] == rows
        return NamedSharding(mesh, BATCH if is_batch else REPLICATED)

    placed = (
        *(shardings(mesh, RULES, each) for each in (half.trained, half.frozen)),
        *(jax.tree.map(place, each) for each in inputs),
    )
    gradient = jax.jit(activations.on(mesh, abnet.gradient(half)), in_shardings=placed)
    return gradient.lower(half.trained, half.frozen, *inputs)
