"""The replica of the model that one cluster trains, planned on its devices.

B rows of a cluster's batch, L length, P fragments.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.bert import config, data, models
from experiments.pretraining import text as text_lib
from nebula_jax.communication import ranks
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import bert, partition
from nebula_jax.training import state as train_state


class Replica(NamedTuple):
    """The programs and the first state of one cluster's replica."""

    config: bert.Config
    mesh: Mesh
    fresh: mesh_lib.ShardedInit  # `state`, in rounds `outers` and `codecs`, at step 0
    frozen: Any
    step: Callable[..., Any]  # (state, frozen, *batch) -> (state, metrics); see `batch`
    evaluate: Callable[..., bert.Sums]  # (trained, frozen, key, [B, L] int32) -> sums
    share: data.Share  # the rows of the cluster, B, in the batches of its stream
    member: member_lib.Member | None = None  # its part in rounds; None if it is alone

    @property
    def specs(self) -> Any:
        """The specs and shardings of the parameters that train, for local steps."""
        shapes, sharding = self.fresh.shapes["state"], self.fresh.sharding["state"]
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            shapes.params,
            sharding.params,
        )

    def in_rounds(self, member: member_lib.Member) -> "Replica":
        """Returns the replica with its part in rounds, whose state is saved with it."""
        init, shapes, _ = self.fresh

        def with_rounds(fresh: dict[str, Any]) -> dict[str, Any]:
            return fresh | member.first(fresh["state"].params)

        shapes = jax.eval_shape(with_rounds, shapes)
        fresh = mesh_lib.ShardedInit(
            lambda: with_rounds(init()),
            shapes,
            rules.shardings(self.mesh, rules.RULES, shapes),
        )
        return self._replace(fresh=fresh, member=member)

    def resume(
        self,
        arrays: dict[str, Any],
        saved: dict[str, Any] | None,
        text: text_lib.Text,
    ) -> train_state.TrainState:
        """Resumes from a checkpoint, or begins at step 0; returns the state.

        `arrays` are like `fresh`; `saved` is the position beside them, None at step 0.
        """
        position = saved or {"text": None, "rounds": None}
        here = mesh_lib.rows_here(self.mesh, self.share.rows)
        text.begin(position["text"], self.share.batch_size, self.share.within(here))
        if self.member is not None:
            self.member.resume(arrays, position["rounds"])
        return arrays["state"]

    def to_save(
        self, state: train_state.TrainState, text: text_lib.Text
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what `resume` takes: arrays, and the position beside them."""
        own = {} if self.member is None else self.member.arrays
        rounds = None if self.member is None else self.member.position
        position = {"text": text.position(), "rounds": rounds}
        return {"state": state} | own, position

    def params(self, state: train_state.TrainState) -> Any:
        """Returns all parameters, on the root's host; None in other processes."""
        return ranks.to_root(partition.merge(state.params, self.frozen))

    def batch(self, input_ids: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Puts [rows here, L] int32 on the devices, and the number of the first row."""
        batch = mesh_lib.put_rows(self.mesh, input_ids, self.share.rows)
        # Masks are drawn by a row's number in the batch of all clusters.
        number = np.int32(self.share.number)
        return batch, mesh_lib.put(number, mesh_lib.replicated(self.mesh))

    def held_out(
        self, trained: Any, text: text_lib.Text
    ) -> dict[str, dict[str, float]]:
        """Evaluates the trained parameters on held-out text, masked alike every time.

        Returns language -> `mlm_loss` in nats a masked token, and `mlm_accuracy`.
        """
        everywhere = mesh_lib.replicated(self.mesh)

        def sums(rng: jax.Array, batch: np.ndarray) -> bert.Sums:
            ids = mesh_lib.put(batch, everywhere)
            return self.evaluate(trained, self.frozen, rng, ids)

        return text_lib.masked_lm_figures(text.held_out(), sums)


def plan(run: config.Run, made: models.Models, index: int) -> Replica:
    """Plans the replica of cluster `index`.

    Raises errors.SettingsError if the devices do not divide a batch.
    """
    agreed, settings = run.agreed, made.config
    share = data.share_of(agreed, index)
    mesh = devices.mesh(run.local.layout(), share.rows, agreed.micro_batches)
    init = functools.partial(bert.init, settings, agreed.seed, made.encoder)
    planned = mesh_lib.sharded_init
    if made.encoder is not None:
        planned = mesh_lib.sharded_init_from_arrays
    whole = planned(mesh, init)
    (shapes, frozen_shapes), (sharding, frozen_at) = whole.shapes, whole.sharding
    frozen = whole.init()[1] if jax.tree.leaves(frozen_shapes) else frozen_shapes
    inputs = [frozen_at, rules.BATCH, rules.REPLICATED]
    step = functools.partial(bert.step, settings)
    fresh = mesh_lib.ShardedInit(
        lambda: {"state": whole.init()[0]}, {"state": shapes}, {"state": sharding}
    )
    return Replica(
        config=settings,
        mesh=mesh,
        fresh=fresh,
        frozen=frozen,
        step=mesh_lib.jit_step(step, mesh, rules.RULES, shapes, inputs=inputs),
        evaluate=_evaluation(settings, mesh),
        share=share,
    )


def _evaluation(settings: bert.Config, mesh: Mesh) -> Callable[..., bert.Sums]:
    """Compiles the evaluation of a batch that every device has."""

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
    def evaluate(trained: Any, frozen: Any, *batch: Any) -> bert.Sums:
        params = partition.merge(trained, frozen)
        return bert.evaluate(settings, params, *batch)

    return evaluate
