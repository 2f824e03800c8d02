"""The number of micro-batches of a generator's step: --fan_out, or what is measured.

With --fan_out=auto both sides take a few steps before the first, which are forgotten.
Every generator sends how long a micro-batch takes it; the discriminator chooses, keeps
the number with its checkpoints, and sends it to all.

B rows of a micro-batch, L length, n micro-batches.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.m3 import config
from nebula_jax.communication import channels, codecs, ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.parallel import fan_out
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import RULES
from nebula_jax.runtime.life import process
from nebula_jax.training import m3, m3_steps

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
SECONDS = jax.ShapeDtypeStruct((), jnp.float32)


class Ends(NamedTuple):
    """One cluster's ends of the two channels of --fan_out=auto."""

    seconds: Any
    """Generator -> discriminator, [] float32: of a micro-batch."""
    number: Any
    """Discriminator -> generator, [] int32: n."""


def generator_ends(agreed: config.Agreed, carrier: channels.Carrier) -> Ends | None:
    """Opens a generator's ends, if n is to be measured."""
    if agreed.fan_out != config.AUTO:
        return None
    return Ends(
        carrier.sender("seconds", SECONDS, codecs.identity()),
        carrier.receiver("fan_out", NUMBER, codecs.identity(), check=_check_number),
    )


def discriminator_ends(agreed: config.Agreed, carrier: channels.Carrier) -> Ends | None:
    """Opens the discriminator's ends to one generator, if n is to be measured."""
    if agreed.fan_out != config.AUTO:
        return None
    return Ends(
        carrier.receiver("seconds", SECONDS, codecs.identity(), check=_check_seconds),
        carrier.sender("fan_out", NUMBER, codecs.identity()),
    )


def in_generator(
    run: config.Run,
    ends: Ends | None,
    start: int,
    model: m3.Config,
    mesh: Mesh,
    fresh: mesh_lib.ShardedInit,
) -> int:
    """Returns n.

    Args:
      run: of this process.
      ends: of this generator.
      start: the step that the run goes on after; 0 at its beginning.
      model: of the run.
      mesh: of the generator's cluster.
      fresh: its state at step 0.
    """
    if ends is None:
        return int(run.agreed.fan_out)
    if start == 0:
        emulated, _ = run.local.emulated_seconds()
        seconds = emulated + _generator_seconds(run.agreed, model, mesh, fresh)
        ends.seconds.send(0, np.float32(seconds))
    return int(ends.number.recv(start))


def in_discriminator(
    run: config.Run,
    ends: Sequence[Ends | None],
    start: int,
    position: Mapping[str, Any] | None,
    model: m3.Config,
    mesh: Mesh,
    fresh: mesh_lib.ShardedInit,
) -> int:
    """Returns n, and sends it if it was measured.

    Args:
      run, start, model: as for `in_generator`.
      ends: to every generator.
      position: what was saved with step `start`, with n as `fan_out`.
      mesh: of the discriminator's cluster.
      fresh: its state at step 0.
    """
    measured = [each for each in ends if each is not None]
    if not measured:
        return int(run.agreed.fan_out)
    if start == 0:
        generators = [float(each.seconds.recv(0)) for each in measured]
        _, emulated = run.local.emulated_seconds()
        seconds = emulated + _discriminator_seconds(run.agreed, model, mesh, fresh)
        chosen, why = fan_out.choose(generators, seconds, mesh_lib.replicas(mesh))
        chosen = ranks.agree(chosen)
        if ranks.is_root():
            process.message(why)
    else:
        assert position is not None
        chosen = int(position["fan_out"])
    for each in measured:
        each.number.send(start, np.int32(chosen))
    return chosen


def _generator_seconds(
    agreed: config.Agreed, model: m3.Config, mesh: Mesh, fresh: mesh_lib.ShardedInit
) -> float:
    """Measures a generator's step of one micro-batch."""
    step = fan_out.generator_step(model, mesh, fresh)
    shape = (agreed.batch_size, agreed.max_length)
    text = np.full(shape, vocabularies.NUM_SPECIAL, np.int32)
    batch = mesh_lib.put(text, mesh_lib.batch_sharding(mesh))

    def taken(state: Any) -> Any:
        return step(state, batch, lambda tokens, number: None)[0]

    return fan_out.measure(taken, fresh.init())


def _discriminator_seconds(
    agreed: config.Agreed, model: m3.Config, mesh: Mesh, fresh: mesh_lib.ShardedInit
) -> float:
    """Measures a step with a micro-batch of each generator on each replica."""
    replicas = mesh_lib.replicas(mesh)
    step = mesh_lib.jit_step(
        functools.partial(
            m3_steps.discriminator_step, dataclasses.replace(model, fan_out=replicas)
        ),
        *(mesh, RULES, fresh.shapes),
    )
    spec = m3.tokens_spec(model, agreed.batch_size)
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    tokens = mesh_lib.put(nothing, mesh_lib.batch_sharding(mesh))
    received = [tokens] * (replicas * len(agreed.groups()))
    return fan_out.measure(lambda state: step(state, received)[0], fresh.init())


def _check_seconds(seconds: Any) -> None:
    value = float(np.asarray(seconds))
    if not 0 < value < np.inf:
        raise ValueError(f"{value} s")


def _check_number(number: Any) -> None:
    value = int(np.asarray(number))
    if value < 1:
        raise ValueError(f"{value} micro-batches")
