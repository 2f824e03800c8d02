"""ABNet in one process: the uncut model, or both halves with the codecs between them.

With identity codecs it takes one gradient of the whole loss in the parameters of both
sides, no cut anywhere: the reference that the split run must equal. With others both
halves run here over a loopback: what the codecs do to training, without a line.
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
    target_model,
)
from experiments.abnet import target as target_side
from nebula_jax.communication import loopback
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut, partition
from nebula_jax.training import state as train_state

Folders = tuple[pathlib.Path, pathlib.Path]
"""Text of source and target."""
States = tuple[train_state.TrainState, train_state.TrainState]
"""The source's and the target's."""
Codecs = tuple[list[cut.States], list[cut.States]]
"""States of the source's codecs and of the target's, for each length bucket."""
Metrics = dict[str, jax.Array]
StepFn = Callable[[States, int], tuple[tuple[Any, Any], Metrics, Metrics]]
"""(states, step) -> gradients of source and target, the loss that is the source's own,
metrics of the target."""


class Both(NamedTuple):
    """The models and text of both sides, source first."""

    plms: tuple[models.Plm, models.Plm]
    texts: tuple[data.Text, data.Text]
    halves: tuple[models.Half, models.Half]
    batches: tuple[batches.Source, batches.Target]

    @property
    def width(self) -> int:
        """The width of PLM-S, D."""
        return self.plms[0].model.config.width

    def of_one_part(self) -> "Both":
        """Returns the same with batches that are one micro-batch each."""
        agreed = dataclasses.replace(self.batches[0].agreed, micro_batches=1)
        source, target = (each._replace(agreed=agreed) for each in self.batches)
        return self._replace(batches=(source, target))

    def at(self, step: int, states: States) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """Returns a step's bucket, and both sides' micro-batches with their keys."""
        bucket, of_source = self.batches[0].at(step)
        _, of_target = self.batches[1].at(step)
        source, target = self.halves
        parts = zip(
            source.with_key(of_source, states[0]),
            target.with_key(of_target, states[1]),
            strict=True,
        )
        return bucket, parts


def load(run: config.Run, folders: Folders) -> Both:
    """Reads models and text of both sides."""
    agreed, plms = run.agreed, (models.load_source(run), target_model.load(run))
    texts = (
        data.read(run, folders[0], plms[0].tokenizer, is_translated=True),
        data.read(run, folders[1], plms[1].tokenizer, is_translated=False),
    )
    shapes = [plm.model.config for plm in plms]
    is_trained = target_model.is_trained(run.local)
    source = models.source_half(run, plms[0], shapes[1])
    target = models.target_half(run, plms[1], shapes[0], is_trained)
    if agreed.bottleneck:
        beginning = bottleneck.of_text(run, plms[0], texts[0], shapes[1])
        source = models.begun(run, plms[0], source, models.SOURCE, beginning)
        target = models.begun(run, plms[1], target, models.TARGET, beginning)
    order = batches.schedule(agreed, batches.row_buckets(agreed, texts[0]))
    lengths = texts[1].train.lengths
    both = (
        batches.Source(agreed, source.mesh, texts[0], order, lengths),
        batches.Target(agreed, target.mesh, texts[1], order),
    )
    return Both(plms, texts, (source, target), both)


def train(run: config.Run, folders: Folders) -> int:
    """Trains both sides to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    both = load(run, folders)
    carriers = loopback.ends()
    ends = open_ends(agreed, both, carriers)
    saved = open_checkpoints(run, context, both)
    arrays, _ = saved.restore(saved.newest, fresh(agreed, both))
    states = arrays[0]["state"], arrays[1]["state"]
    codecs = arrays[0]["codecs"], arrays[1]["codecs"]
    del arrays
    # Without a codec the reference is the model that nobody cut.
    take_step = uncut(both) if is_uncut(agreed) else in_process(both, ends, codecs)
    evaluate = evaluation_of(run, context, both, ends)
    context.begin(saved.newest)
    for step in context.each(context.alone()):
        states, metrics = context.compute(
            step, whole_step, both, take_step, states, step
        )
        context.record.step(step, metrics)
        if agreed.is_evaluated(step):
            evaluate(states, step)
        saved.after(step, to_save(states, codecs))
    saved.at_end(context.step, to_save(states, codecs))
    described = {
        "text": data.describe(both.texts[0]),
        "sent": dict(carriers[0].out.sent + carriers[1].out.sent),
        "trained_parameters": sum(map(models.trained_parameters, states)),
    }
    context.finish(described)
    return context.exit_status()


def open_ends(
    agreed: config.Agreed, both: Both, carriers: tuple[loopback.End, loopback.End]
) -> tuple[channels.Ends, channels.Ends]:
    """Opens the channels between the halves, for source and target."""
    size = len(both.texts[0].train), both.width
    return (
        channels.open_ends(agreed, carriers[0], "source", *size),
        channels.open_ends(agreed, carriers[1], "target", *size),
    )


def open_checkpoints(
    run: config.Run, context: context_lib.Context, both: Both
) -> checkpoints.Checkpoints:
    """Opens the checkpoints, which have both sides."""
    digests = {
        "source_model": both.plms[0].digest,
        "source_text": data.digest(run, both.texts[0]),
        "target_model": target_model.fingerprint(run),
        "target_text": data.digest(run, both.texts[1]),
    }
    return context.open_checkpoints(configuration.settings(run.agreed), digests)


def fresh(agreed: config.Agreed, both: Both) -> mesh_lib.ShardedInit:
    """Returns what is saved, at step 0: a pair, each side as its cluster saves it."""
    sides = [channels.fresh(agreed, half, both.width) for half in both.halves]
    return mesh_lib.ShardedInit(
        lambda: tuple(side.init() for side in sides),
        tuple(side.shapes for side in sides),
        tuple(side.sharding for side in sides),
    )


def to_save(states: States, codecs: Codecs) -> tuple[dict[str, Any], ...]:
    """Returns the arrays of a checkpoint; see `fresh`."""
    return tuple(
        {"state": state, "codecs": of_side}
        for state, of_side in zip(states, codecs, strict=True)
    )


def whole_step(
    both: Both, take_step: StepFn, states: States, step: int
) -> tuple[States, Metrics]:
    """Takes a step of both sides; a loss that is not finite is a step of neither."""
    source, target = both.halves
    (of_source, of_target), own, metrics = take_step(states, step)
    metrics = target_side.step_metrics(metrics)
    first, at_source = source.apply(states[0], of_source, metrics | own)
    second, metrics = target.apply(states[1], of_target, metrics)
    metrics["is_finite"] &= at_source["is_finite"]
    return (first, second), metrics


def evaluation_of(
    run: config.Run,
    context: context_lib.Context,
    both: Both,
    ends: tuple[channels.Ends, channels.Ends],
) -> Callable[[States, int], None]:
    """Returns a function that translates after a step, and records the figures."""
    agreed, (source, target), texts = run.agreed, both.halves, both.texts
    encode = evaluation.encoder(agreed, source.task)
    decode = evaluation.decoder(agreed, target.task)
    sender, receiver = ends[0].evaluation, ends[1].evaluation

    def evaluate(states: States, step: int) -> None:
        params = source.params(states[0]), target.params(states[1])
        with context.evaluating():
            evaluation.send(agreed, texts[0], encode, params[0], step, sender)
            figures = evaluation.evaluate(
                run, texts[1], decode, params[1], step, receiver
            )
        context.record.evaluation(step, figures)

    return evaluate


def is_uncut(agreed: config.Agreed) -> bool:
    """Returns True if no codec lies between the halves."""
    return all(text in ("", "identity") for text in agreed.codec_texts)


def uncut(both: Both) -> StepFn:
    """Returns a step that takes one `jax.grad` of the whole loss, whole batches."""
    source, target = both.halves
    both = both.of_one_part()

    @jax.jit
    def differentiate(trained: Any, frozen: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            params = list(map(partition.merge, trained, frozen))
            hidden, length_loss = abnet_training.front(
                source.task, params[0], *batch[0]
            )
            translation_loss, metrics = abnet_training.back(
                target.task, params[1], hidden, *batch[1]
            )
            return length_loss + translation_loss, ({"loss": length_loss}, metrics)

        grads, (own, metrics) = jax.grad(loss, has_aux=True)(trained)
        return grads, own, metrics

    def take_step(states: States, step: int) -> Any:
        _, parts = both.at(step, states)
        return differentiate(
            [state.params for state in states],
            [source.frozen, target.frozen],
            next(parts),
        )

    return take_step


def in_process(
    both: Both, ends: tuple[channels.Ends, channels.Ends], codecs: Codecs
) -> StepFn:
    """Returns a step of both halves, with what crosses going through the codecs.

    Args:
      both: models and text.
      ends: of source and target, of one loopback.
      codecs: states of the source's codecs and of the target's; each step replaces its
        bucket's.
    """
    (source, target), (source_ends, target_ends) = both.halves, ends

    def take_step(states: States, step: int) -> Any:
        bucket, parts = both.at(step, states)
        grads, new_codecs, length_loss, metrics = pipeline.in_process_step(
            (source.program, target.program),
            (source.params(states[0]), target.params(states[1])),
            parts,
            (None, None),
            step,
            (source_ends.hidden[bucket], target_ends.hidden[bucket]),
            (target_ends.gradient[bucket], source_ends.gradient[bucket]),
            (codecs[0][bucket], codecs[1][bucket]),
        )
        codecs[0][bucket], codecs[1][bucket] = new_codecs
        return grads, {"loss": length_loss}, metrics

    return take_step
