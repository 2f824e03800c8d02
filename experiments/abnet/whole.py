"""ABNet in one process: the uncut model, or both halves with the codecs between them.

With identity codecs it takes one gradient of the whole loss in the parameters of both
sides, no cut anywhere: the reference that the split run must equal. With others both
halves run here over a loopback: what the codecs do to training, without a line.
"""

from typing import Any

import jax

from experiments import lifecycle, progress, saved, shared_flags
from experiments.abnet import channels as abnet_channels
from experiments.abnet import config as abnet_config
from experiments.abnet import data as abnet_data
from experiments.abnet import models as abnet_models
from experiments.abnet import source as abnet_source
from experiments.abnet import target as abnet_target
from nebula_jax.communication import loopback
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut


def run(folders: tuple[Any, Any]) -> int:
    """Trains both sides to the end; the exit status.

    Args:
      folders: text of source and target.
    """
    name = "whole"
    interrupt = lifecycle.Interrupt().install()
    source_plm, target_plm = abnet_models.load_source(), abnet_models.load_target()
    source, target = sides(folders, source_plm, target_plm)
    near_end, far_end = loopback.ends()
    width = source_plm.model.config.width
    near = abnet_channels.open_ends(near_end, "source", len(source.rows), width)
    far = abnet_channels.open_ends(far_end, "target", len(source.rows), width)

    own = {
        "source_model": source_plm.digest,
        "source_text": abnet_data.digest(source.text),
        "target_model": abnet_models.target_digest(),
        "target_text": abnet_data.digest(target.text),
    }
    agreed = abnet_config.settings(abnet_data.PAIR.value)
    checkpoints = saved.Saved(name, agreed, own=own)
    start = max([0, *checkpoints.steps])
    likes = [
        mesh_lib.sharded_init_with_codecs(side.placed, side.mesh, side.codecs)
        for side in (source, target)
    ]
    both = mesh_lib.ShardedInit(
        lambda: tuple(like.init() for like in likes),
        tuple(like.shapes for like in likes),
        tuple(like.sharding for like in likes),
    )
    restored, _ = checkpoints.restore(start, both)
    for side, own in zip((source, target), restored, strict=True):
        side.codecs = own["codecs"]
    states = [own["state"] for own in restored]
    record = progress.Progress(name, start)
    step_of = _uncut if is_uncut() else _looped

    def save(step: int) -> None:
        checkpoints.save(
            step,
            tuple(
                {"state": state, "codecs": side.codecs}
                for state, side in zip(states, (source, target), strict=True)
            ),
        )

    take = step_of(source, target, near, far)
    interrupt.is_graceful = True
    step = start
    while step < shared_flags.STEPS.value and not interrupt.requested:
        step += 1
        grads, metrics = take(states, step)
        states = [
            side.apply(state, own)
            for side, state, own in zip((source, target), states, grads, strict=True)
        ]
        record.step(step, target.told(metrics))
        if abnet_config.is_evaluated(step):
            source.send_judged(states[0], step, near)
            record.evaluation(step, target.judge(states[1], step, far.evaluation))
        if checkpoints.is_due(step):
            save(step)
    if start < step and step not in checkpoints.steps:
        save(step)
    sent = dict(near_end.out.sent + far_end.out.sent)
    more = {
        "text": abnet_data.describe(source.text),
        "sent": sent,
        "trained_parameters": sum(abnet_models.size(state) for state in states),
    }
    record.finish(step, more)
    return lifecycle.exit_status(step, interrupt)


def sides(
    folders: tuple[Any, Any], source_plm: abnet_models.Plm, target_plm: abnet_models.Plm
) -> tuple[abnet_source.Side, abnet_target.Side]:
    """Both sides in one process; they have told each other buckets and lengths.

    Args:
      folders: text of source and target.
      source_plm, target_plm: their models.
    """
    source = abnet_source.Side(
        source_plm,
        abnet_data.read(folders[0], source_plm.words, is_translated=True),
        target_plm.model.config,
    )
    target = abnet_target.Side(
        target_plm,
        abnet_data.read(folders[1], target_plm.words, is_translated=False),
        source_plm.model.config,
    )
    target.sort(source.buckets)
    source.lengths = target.rows.lengths
    return source, target


def is_uncut() -> bool:
    """Whether nothing lies between the halves."""
    codecs = (abnet_config.FORWARD_CODEC.value, abnet_config.BACKWARD_CODEC.value)
    return all(codec in ("", "identity") for codec in codecs)


def _uncut(source, target, near, far):
    """(states, step) -> gradients of both sides and metrics, by one `jax.grad`."""
    del near, far

    @jax.jit
    def differentiate(trained, frozen, batches, rngs):
        def loss(trained):
            params = [cut.merge(*each) for each in zip(trained, frozen, strict=True)]
            hidden, own = abnet_training.front(
                source.task, params[0], batches[0], rngs[0]
            )
            far_loss, metrics = abnet_training.back(
                target.task, params[1], hidden, batches[1], rngs[1]
            )
            return own + far_loss, metrics

        return jax.grad(loss, has_aux=True)(trained)

    def take(states, step):
        _, source_batches = source.batch(step, micro_batches=1)
        _, target_batches = target.batch(step, micro_batches=1)
        return differentiate(
            [state.params for state in states],
            [source.frozen, target.frozen],
            (next(source_batches), next(target_batches)),
            (source.key, states[1].key()),
        )

    return take


def _looped(source, target, near, far):
    """(states, step) -> gradients of both sides and metrics, through the codecs."""

    def take(states, step):
        bucket, source_batches = source.batch(step)
        _, target_batches = target.batch(step)
        grads, codecs, _, metrics = pipeline.in_process_step(
            (source.half, target.half),
            (source.all_params(states[0]), target.all_params(states[1])),
            zip(source_batches, target_batches, strict=True),
            (source.key, states[1].key()),
            step,
            (near.hidden[bucket], far.hidden[bucket]),
            (far.gradient[bucket], near.gradient[bucket]),
            (source.codecs[bucket], target.codecs[bucket]),
            grads=tuple(cut.zero_grads(state.params) for state in states),
        )
        source.codecs[bucket], target.codecs[bucket] = codecs
        return grads, metrics

    return take
