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

from experiments.abnet import (
    channels,
    config,
    data,
    evaluation,
    models,
    sides,
)
from experiments.abnet import target as target_side
from nebula_jax.communication import loopback
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import partition

Folders = tuple[pathlib.Path, pathlib.Path]  # text of source and target
Saved = tuple[dict[str, Any], dict[str, Any]]
"""The `state` of the source and of the target, and the states of their `codecs` for
each length bucket: a pair, each as its own cluster saves it."""
Metrics = dict[str, jax.Array]
StepFn = Callable[[Saved, int], tuple[tuple[Any, Any], Metrics, Metrics]]
"""(both sides, step) -> gradients of source and target, the loss that is the source's
own, metrics of the target. The states of codecs are replaced in their lists."""


class Both(NamedTuple):
    """The models and text of both sides, source first, and the loopback between."""

    plms: tuple[models.Plm, ...]
    texts: tuple[data.Text, ...]
    fingerprints: dict[str, str]  # of all that was read: a run resumes with the same
    halves: tuple[models.Half, ...]
    batches: tuple[data.SourceBatches, data.TargetBatches]
    carriers: tuple[loopback.End, loopback.End]
    ends: tuple[channels.Ends, ...]

    @property
    def width(self) -> int:
        """The width of PLM-S, D."""
        return self.plms[0].model.config.width

    def of_one_part(self) -> "Both":
        """Returns the same with batches that are one micro-batch each."""
        agreed = dataclasses.replace(self.batches[0].agreed, micro_batches=1)
        source, target = (each._replace(agreed=agreed) for each in self.batches)
        return self._replace(batches=(source, target))

    def at(self, step: int, saved: Saved) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """Returns a step's bucket, and both sides' micro-batches with their keys."""
        bucket, _ = self.batches[0].at(step)
        parts = (
            half.with_key(own.at(step)[1], side["state"])
            for half, own, side in zip(self.halves, self.batches, saved, strict=True)
        )
        return bucket, zip(*parts, strict=True)

    def params(self, saved: Saved) -> list[Any]:
        """Returns all parameters of source and target."""
        pairs = zip(self.halves, saved, strict=True)
        return [half.params(side["state"]) for half, side in pairs]


def load(run: config.Run, folders: Folders) -> Both:
    """Reads models and text of both sides, and opens all channels between them."""
    agreed = run.agreed
    read = [sides.read(run, side, folders[side]) for side in models.SIDES]
    plms, texts, fingerprints = zip(*read, strict=True)
    shapes = [plm.model.config for plm in plms]
    beginning = None
    if agreed.bottleneck:
        beginning = sides.best_directions(run, plms[0], texts[0], shapes[1])
    source, target = (
        models.half(run, side, plms[side], shapes[1 - side], beginning)
        for side in models.SIDES
    )
    order = data.schedule(agreed, data.row_buckets(agreed, texts[0]))
    lengths = texts[1].train.lengths
    carriers = loopback.ends()
    size = len(texts[0].train), shapes[0].width
    return Both(
        plms,
        texts,
        fingerprints[0] | fingerprints[1],
        (source, target),
        (
            data.SourceBatches(agreed, source.mesh, texts[0], order, lengths),
            data.TargetBatches(agreed, target.mesh, texts[1], order),
        ),
        carriers,
        tuple(
            channels.open_ends(agreed, carriers[side], models.ROLES[side], *size)
            for side in models.SIDES
        ),
    )


def train(run: config.Run, folders: Folders) -> int:
    """Trains both sides to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    both = load(run, folders)
    settings = config.settings(run)
    checkpoints = context.open_checkpoints(settings, both.fingerprints)
    saved, _ = checkpoints.restore(checkpoints.newest, fresh(agreed, both))
    # Without a codec the reference is the model that nobody cut.
    is_uncut = agreed.forward_codec == agreed.backward_codec == "identity"
    take_step = uncut(both) if is_uncut else in_process(both)
    encode = evaluation.encoder(agreed, both.halves[0].task)
    decode = evaluation.decoder(agreed, both.halves[1].task)
    context.begin(checkpoints.newest)
    for step in context.each(context.alone()):
        saved, metrics = context.compute(step, whole_step, both, take_step, saved, step)
        context.record.step(step, metrics)
        if agreed.is_evaluated(step):
            params, texts = both.params(saved), both.texts
            there, here = (ends.evaluation for ends in both.ends)
            with context.evaluating():
                evaluation.send(agreed, texts[0], encode, params[0], step, there)
                figures = evaluation.evaluate(
                    run, texts[1], decode, params[1], step, here
                )
            context.record.evaluation(step, figures)
        checkpoints.after(step, saved)
    checkpoints.at_end(context.step, saved)
    carriers = both.carriers
    described = {
        "text": data.describe(both.texts[0]),
        "width": both.width,
        "sent": dict(carriers[0].sent + carriers[1].sent),
        "trained_parameters": sum(
            models.trained_parameters(side["state"]) for side in saved
        ),
    }
    context.finish(described)
    return context.exit_status()


def fresh(agreed: config.Agreed, both: Both) -> mesh_lib.ShardedInit:
    """Returns what is saved, at step 0."""
    of_sides = [channels.fresh(agreed, half, both.width) for half in both.halves]
    return mesh_lib.ShardedInit(
        lambda: tuple(side.init() for side in of_sides),
        tuple(side.shapes for side in of_sides),
        tuple(side.sharding for side in of_sides),
    )


def whole_step(
    both: Both, take_step: StepFn, saved: Saved, step: int
) -> tuple[Saved, Metrics]:
    """Takes a step of both sides; a loss that is not finite is a step of neither."""
    source, target = both.halves
    (of_source, of_target), own, metrics = take_step(saved, step)
    metrics = target_side.step_metrics(metrics)
    first, at_source = source.apply(saved[0]["state"], of_source, metrics | own)
    second, metrics = target.apply(saved[1]["state"], of_target, metrics)
    metrics["is_finite"] &= at_source["is_finite"]
    return (saved[0] | {"state": first}, saved[1] | {"state": second}), metrics


def uncut(both: Both) -> StepFn:
    """Returns a step that takes one `jax.grad` of the whole loss, whole batches."""
    source, target = both.halves
    both = both.of_one_part()

    @jax.jit
    def differentiate(trained: Any, frozen: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            params = list(map(partition.merge, trained, frozen))
            hidden, length_loss = abnet_training.front(source.task, params[0], batch[0])
            translation_loss, metrics = abnet_training.back(
                target.task, params[1], hidden, batch[1]
            )
            return length_loss + translation_loss, ({"loss": length_loss}, metrics)

        grads, (own, metrics) = jax.grad(loss, has_aux=True)(trained)
        return grads, own, metrics

    def take_step(saved: Saved, step: int) -> Any:
        _, parts = both.at(step, saved)
        return differentiate(
            [side["state"].params for side in saved],
            [half.frozen for half in both.halves],
            next(parts),
        )

    return take_step


def in_process(both: Both) -> StepFn:
    """Returns a step of both halves, with what crosses going through the codecs."""
    (source, target), (source_ends, target_ends) = both.halves, both.ends

    def take_step(saved: Saved, step: int) -> Any:
        bucket, parts = both.at(step, saved)
        of_source, of_target = (side["codecs"] for side in saved)
        grads, new, length_loss, metrics = pipeline.in_process_step(
            (source.program, target.program),
            both.params(saved),
            parts,
            (None, None),
            step,
            (source_ends.hidden[bucket], target_ends.hidden[bucket]),
            (target_ends.gradient[bucket], source_ends.gradient[bucket]),
            (of_source[bucket], of_target[bucket]),
        )
        of_source[bucket], of_target[bucket] = new
        return grads, {"loss": length_loss}, metrics

    return take_step
