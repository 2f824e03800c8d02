"""The copy of the model that one cluster trains: planned on its devices, not yet made.

B rows of a cluster's batch, L length, P fragments.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.bert import config, data, models, timing
from experiments.pretraining import text as text_lib
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.data import joined_rows
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import bert, partition
from nebula_jax.training import state as train_state


class Batch(NamedTuple):
    """A batch of a cluster, on its devices."""

    inputs: tuple[Any, ...]
    """The last arguments of `Copy.step`."""
    left_out: jax.Array
    """[] int32, sequences of all processes that found no room in the rows of the layout
    `joined`."""


class Copy(NamedTuple):
    """The programs and the first state of one cluster's copy."""

    config: bert.Config
    mesh: Mesh
    fresh: mesh_lib.ShardedInit
    """`state`, and with local steps `outers` and `codecs`, at step 0."""
    frozen: Any
    """The parameters that do not train."""
    step: Callable[..., Any]
    """(state, frozen, *inputs) -> (state, metrics); see `batch`."""
    evaluate: Callable[..., bert.Sums]
    """(trained, frozen, key, [B, L] int32, first row) -> sums."""
    member: member_lib.Member | None
    """This cluster's part in rounds of local steps; None if there is one cluster."""
    rows: int
    """B."""

    def batch(self, input_ids: np.ndarray, number: int, progress: float) -> Batch:
        """Puts a batch on the devices.

        Args:
          input_ids: [rows of this process, L] int32.
          number: of this cluster's first row in the batch of all clusters.
          progress: share of the run's time that is over.
        """
        everywhere = mesh_lib.replicated(self.mesh)
        batch = mesh_lib.put_rows(self.mesh, input_ids, self.rows)
        numbers = np.int32(number), np.float32(progress)
        more = mesh_lib.put(numbers, everywhere)
        if self.config.layout == "padded":
            return Batch((batch, *more), jnp.zeros((), jnp.int32))
        replicas, here = mesh_lib.replicas(self.mesh), len(input_ids)
        groups = replicas * here // self.rows
        rows = self.config.rows(self.rows, replicas) * here // self.rows
        lengths = joined_rows.lengths(input_ids, vocabularies.SPECIAL.pad)
        plan = joined_rows.plan(lengths, input_ids.shape[1], rows, groups)
        total = rows * self.rows // here
        where = mesh_lib.put_rows(self.mesh, plan.where, total)
        left_out = mesh_lib.total(self.mesh, plan.left_out)
        return Batch((batch, *more, where), left_out)


class Position(NamedTuple):
    """The place of a run that is no array, in a checkpoint; JSON values."""

    text: Any = None
    time: Any = None
    rounds: Any = None


def begin(
    copy: Copy,
    arrays: dict[str, Any],
    saved: dict[str, Any] | None,
    text: text_lib.Text,
    share: data.Share,
    timer: timing.Timer,
) -> train_state.TrainState:
    """Goes on from a checkpoint, or from step 0; returns the state.

    Args:
      copy: of the cluster.
      arrays: restored, like `copy.fresh`.
      saved: the position beside them; None at step 0.
      text, share, timer: of the cluster.
    """
    position = Position() if saved is None else Position(**saved)
    here = mesh_lib.rows_here(copy.mesh, copy.rows)
    text.begin(position.text, share.batch_size, share.within(here))
    timer.go_on(position.time)
    if copy.member is not None:
        copy.member.resume(arrays, position.rounds)
    return arrays["state"]


def to_save(
    copy: Copy, state: train_state.TrainState, text: text_lib.Text, timer: timing.Timer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what `begin` goes on from: arrays, and the position beside them."""
    arrays: dict[str, Any] = {"state": state}
    position = Position(text.position(), timer.position)
    if copy.member is not None:
        arrays |= copy.member.arrays
        position = position._replace(rounds=copy.member.position)
    return arrays, position._asdict()


def is_saved_after(agreed: config.Agreed, step: int) -> bool:
    """Returns True if a checkpoint is due after a step, unless it is the last."""
    if agreed.clusters == 1:
        return step % agreed.checkpoint_every == 0
    return agreed.local_steps().is_saved_after(step, agreed.checkpoint_every)


def plan(run: config.Run, made: models.Models, index: int) -> Copy:
    """Plans the copy of a cluster.

    Args:
      run: of this process.
      made: the run's model.
      index: of the cluster, from 0.

    Raises:
      errors.SettingsError: if fragments do not divide the layers, a batch the devices,
        or a receiver of the codec remembers what came before.
    """
    agreed, local = run.agreed, run.local
    rows = agreed.rows()[index]
    mesh = devices.mesh(local.layout(), rows, agreed.micro_batches)
    settings = made.config
    init = functools.partial(bert.init, settings, agreed.seed, made.encoder)
    planned = mesh_lib.sharded_init
    if made.encoder is not None:
        planned = mesh_lib.sharded_init_from_arrays
    whole = planned(mesh, init)
    shapes, frozen_shapes = whole.shapes
    sharding, frozen_at = whole.sharding
    frozen = whole.init()[1] if jax.tree.leaves(frozen_shapes) else frozen_shapes

    everywhere = mesh_lib.replicated(mesh)
    inputs = [frozen_at, rules.BATCH, rules.REPLICATED, rules.REPLICATED]
    if settings.layout == "joined":
        inputs.append(rules.BATCH)
    step = mesh_lib.jit_step(
        functools.partial(bert.step, settings),
        *(mesh, rules.RULES, shapes),
        inputs=inputs,
    )

    @functools.partial(jax.jit, out_shardings=everywhere)
    def evaluate(trained: Any, frozen: Any, *batch: Any) -> bert.Sums:
        params = partition.merge(trained, frozen)
        return bert.evaluate(settings, params, *batch)

    member = None
    if agreed.clusters > 1:
        member = _member(run, index, shapes.params, sharding.params)

    def make() -> dict[str, Any]:
        state = whole.init()[0]
        if member is None:
            return {"state": state}
        return {"state": state} | member.first(state.params)

    all_shapes = jax.eval_shape(
        lambda state: {"state": state} | (member.first(state.params) if member else {}),
        shapes,
    )
    placed = rules.shardings(mesh, rules.RULES, all_shapes)
    fresh = mesh_lib.ShardedInit(make, all_shapes, placed)
    return Copy(settings, mesh, fresh, frozen, step, evaluate, member, rows)


def _member(
    run: config.Run, index: int, shapes: Any, sharding: Any
) -> member_lib.Member:
    agreed, names = run.agreed, config.names(run.agreed)
    codec = agreed.compression().codec
    assert isinstance(codec, codec_lib.Codec)  # a selector has been refused
    try:
        return member_lib.Member(
            agreed.local_steps(),
            codec,
            names,
            own=names[index],
            shapes=shapes,
            sharding=sharding,
            weights=agreed.delta_weights,
        )
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        flag = "--fragments" if field == "fragments" else "--delta_codec"
        raise errors.SettingsError(f"{flag}={rest or error}") from None


def layout(copy: Copy) -> dict[str, Any]:
    """Returns what must be equal in all clusters beside the settings.

    The layout of what crosses: names, shapes and dtypes in each fragment.
    """
    return {} if copy.member is None else {"layout": copy.member.fingerprint}
