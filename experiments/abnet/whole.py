"""ABNet in one process: the uncut model, or both halves with the codecs between them.

With identity codecs it takes one gradient of the whole loss in the parameters of both
sides, no cut anywhere: the reference that the split run must equal. With others both
halves run here over a loopback: what the codecs do to training, without a line. Several
pairs are in `several`.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from experiments import configuration
from experiments.abnet import (
    batches,
    bottleneck,
    channels,
    config,
    data,
    evaluation,
    models,
    staleness,
    target_model,
)
from experiments.abnet import target as target_side
from nebula_jax import trace as trace_lib
from nebula_jax.communication import loopback
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace, pipeline
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, progress
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut, partition
from nebula_jax.training import state as train_state

Folders = tuple[pathlib.Path, pathlib.Path]
"""Text of source and target."""
States = tuple[train_state.TrainState, train_state.TrainState]
"""The source's and the target's."""
Metrics = dict[str, jax.Array]
StepFn = Callable[[States, int], tuple[tuple[Any, Any], Metrics, Metrics]]
"""(states, step) -> gradients of source and target, the loss that is the source's own,
metrics of the target."""


class Both(NamedTuple):
    """The models and text of both sides, source first."""

    plms: tuple[models.Plm, models.Plm]
    texts: tuple[data.Text, data.Text]
    halves: tuple[models.Half, models.Half]
    order: batches.Schedule

    def batch(self, agreed: config.Agreed, step: int) -> tuple[int, Any, Any]:
        """Returns a step's bucket, and iterators over both sides' micro-batches."""
        (source, target), (source_text, target_text) = self.halves, self.texts
        bucket, source_batches = batches.source_batch(
            *(agreed, source.mesh, source_text, self.order),
            *(target_text.train.lengths, step),
        )
        _, target_batches = batches.target_batch(
            agreed, target.mesh, target_text, self.order, step
        )
        return bucket, source_batches, target_batches

    def pairs(
        self, source_batches: Any, target_batches: Any, states: States
    ) -> Iterator[tuple[Any, Any]]:
        """Pairs the sides' micro-batches, each with its key."""
        source, target = self.halves
        return zip(
            source.with_key(source_batches, states[0]),
            target.with_key(target_batches, states[1]),
            strict=True,
        )


def load(run: config.Run, folders: Folders) -> Both:
    """Reads models and text of both sides."""
    plms = models.load_source(run), target_model.load(run)
    texts = tuple(
        data.read(run, folder, plm.tokenizer, is_translated=is_source)
        for folder, plm, is_source in zip(folders, plms, (True, False), strict=True)
    )
    source, target = (plm.model.config for plm in plms)
    is_trained = target_model.is_trained(run.local)
    halves = (
        models.source_half(run, plms[0], target),
        models.target_half(run, plms[1], source, is_trained),
    )
    if run.agreed.rank:
        beginning = bottleneck.of_text(run, plms[0], texts[0], target)
        halves = (
            bottleneck.narrowed_source(run, plms[0], halves[0], beginning),
            bottleneck.narrowed_target(run, plms[1], halves[1], is_trained, beginning),
        )
    buckets = batches.row_buckets(run.agreed, texts[0])
    return Both(plms, texts, halves, batches.Schedule(run.agreed, buckets))


def train(run: config.Run, folders: Folders) -> int:
    """Trains both sides to the end; returns the exit status."""
    agreed, local = run.agreed, run.local
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(trace=trace)
    both = load(run, folders)
    source, target = both.halves
    encode = evaluation.encoder(agreed, source.task)
    decode = evaluation.decoder(agreed, target.task)

    carriers = loopback.ends()
    size = len(both.texts[0].train), both.plms[0].model.config.width
    ends = tuple(
        channels.open_ends(agreed, carrier, role, *size)
        for carrier, role in zip(carriers, ("source", "target"), strict=True)
    )
    saved = checkpoints.Checkpoints(
        local.workdir,
        local.cluster,
        configuration.settings(agreed),
        agreed.checkpoint_every,
        work=work,
        fingerprints={
            "source_model": both.plms[0].digest,
            "source_text": data.digest(run, both.texts[0]),
            "target_model": target_model.fingerprint(run),
            "target_text": data.digest(run, both.texts[1]),
        },
    )
    start = saved.newest
    restored, _ = saved.restore(start, _fresh(agreed, both))
    states = tuple(values["state"] for values in restored)
    codecs = tuple(values["codecs"] for values in restored)
    late = restored[0].get(staleness.LATE)
    record = progress.Progress(
        *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
        work=work,
        allow_nonfinite=local.allow_nonfinite,
    )
    saved.before_save = record.settle

    def to_save() -> tuple[dict[str, Any], ...]:
        sides = tuple(
            {"state": state, "codecs": of_side}
            for state, of_side in zip(states, codecs, strict=True)
        )
        if agreed.staleness:
            sides[0][staleness.LATE] = late
        return sides

    take_step = uncut(agreed, both)
    if not is_uncut(agreed):
        take_step = in_process(agreed, both, ends, codecs)
    interrupt.is_graceful = True
    step = start
    for step in pace.alone(start, agreed.steps, interrupt.requested):
        with trace.span("compute", step=step):
            (of_source, of_target), own, metrics = take_step(states, step)
            if agreed.staleness:
                of_source, late = late, of_source
            metrics = target_side.step_metrics(metrics)
            first, at_source = source.apply(states[0], of_source, metrics | own)
            second, metrics = target.apply(states[1], of_target, metrics)
            states = trace.ready((first, second))
        metrics["is_finite"] &= at_source["is_finite"]
        record.step(step, metrics)
        if agreed.is_evaluated(step):
            params = source.params(states[0]), target.params(states[1])
            texts, (sender, receiver) = both.texts, (end.evaluation for end in ends)
            with work.busy(activity.Activity.EVALUATING):
                evaluation.send(agreed, texts[0], encode, params[0], step, sender)
                figures = evaluation.evaluate(
                    run, texts[1], decode, params[1], step, receiver
                )
            record.evaluation(step, figures)
        saved.after(step, to_save())
    saved.at_end(step, to_save())
    described = {
        "text": data.describe(both.texts[0]),
        "sent": dict(carriers[0].out.sent + carriers[1].out.sent),
        "trained_parameters": sum(map(models.trained_parameters, states)),
    }
    record.finish(step, described)
    return interrupt.exit_status(local.cluster, step, agreed.steps)


def _fresh(agreed: config.Agreed, both: Both) -> mesh_lib.ShardedInit:
    """Returns the states at step 0 with those of the codecs, source and target."""
    width = both.plms[0].model.config.width
    sides = [
        mesh_lib.sharded_init_with_codecs(
            half.fresh,
            half.mesh,
            channels.init_codecs(agreed, half.program, width),
        )
        for half in both.halves
    ]
    sides[0] = staleness.planned(agreed, sides[0])
    return mesh_lib.ShardedInit(
        lambda: tuple(side.init() for side in sides),
        tuple(side.shapes for side in sides),
        tuple(side.sharding for side in sides),
    )


def is_uncut(agreed: config.Agreed) -> bool:
    """Returns True if no codec lies between the halves, and all columns cross."""
    codecs = (agreed.forward_codec, agreed.backward_codec)
    are_plain = all(codec in ("", "identity") for codec in codecs)
    return are_plain and len(agreed.bottleneck) < 2


def uncut(agreed: config.Agreed, both: Both) -> StepFn:
    """Returns a step that takes one `jax.grad` of the whole loss, whole batches."""
    source, target = both.halves
    agreed = dataclasses.replace(agreed, micro_batches=1)

    @jax.jit
    def differentiate(trained: Any, frozen: Any, batch: Any, rngs: Any) -> Any:
        def loss(trained: Any) -> Any:
            params = list(map(partition.merge, trained, frozen))
            hidden, length_loss = abnet_training.front(
                source.task, params[0], batch[0], rngs[0]
            )
            translation_loss, metrics = abnet_training.back(
                target.task, params[1], hidden, batch[1], rngs[1]
            )
            return length_loss + translation_loss, ({"loss": length_loss}, metrics)

        grads, (own, metrics) = jax.grad(loss, has_aux=True)(trained)
        return grads, own, metrics

    def take_step(states: States, step: int) -> Any:
        _, source_batches, target_batches = both.batch(agreed, step)
        return differentiate(
            [state.params for state in states],
            [source.frozen, target.frozen],
            (next(source_batches), next(target_batches)),
            (source.rng(states[0]), target.rng(states[1])),
        )

    return take_step


def in_process(
    agreed: config.Agreed,
    both: Both,
    ends: tuple[channels.Ends, ...],
    codecs: tuple[list[cut.CodecStates], ...],
) -> StepFn:
    """Returns a step of both halves, with what crosses going through the codecs.

    Args:
      agreed: of the run.
      both: models and text.
      ends: of source and target, of one loopback.
      codecs: states of the source's codecs and of the target's, for each length bucket;
        each step replaces its bucket's.
    """
    source, target = both.halves
    source_ends, target_ends = ends

    def take_step(states: States, step: int) -> Any:
        bucket, source_batches, target_batches = both.batch(agreed, step)
        grads, new_codecs, length_loss, metrics = pipeline.in_process_step(
            (source.program, target.program),
            (source.params(states[0]), target.params(states[1])),
            both.pairs(source_batches, target_batches, states),
            (None, None),
            step,
            (source_ends.hidden[bucket], target_ends.hidden[bucket]),
            (target_ends.gradient[bucket], source_ends.gradient[bucket]),
            (codecs[0][bucket], codecs[1][bucket]),
            grads=tuple(cut.zero_grads(state.params) for state in states),
        )
        codecs[0][bucket], codecs[1][bucket] = new_codecs
        return grads, {"loss": length_loss}, metrics

    return take_step
