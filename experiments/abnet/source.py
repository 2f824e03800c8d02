"""The source cluster of ABNet: reads X, sends H^E, receives the gradient in it.

X are the source sentences, H^E the hidden states of PLM-S, the frozen source model,
with adapters (section 3.2, Fig. 5). N training examples.
"""

import numpy as np

from experiments.abnet import (
    batches,
    bottleneck,
    channels,
    config,
    control,
    data,
    evaluation,
    models,
    sides,
)
from nebula_jax.parallel import pipeline
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters


def train(run: config.Run) -> int:
    """Trains the source side to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    own = prepare(run, context)
    text, saved = own.text, own.saved
    with context.dial(own.hello, peer="target", check=own.check) as link:
        half, choice, ends, batch, state, codecs = begin(run, context, own, link)
        encode = evaluation.encoder(agreed, half.task)
        for step in context.each(context.follow(link)):
            with context.trace.span("next batch", step=step):
                bucket, parts = batch.at(step)
            # H^E of each micro-batch is sent as soon as it is computed; its gradient
            # arrives later and finishes the backward pass. Parameters change once a
            # batch.
            grads, codecs[bucket], length_loss = pipeline.front_step(
                half.program,
                half.params(state),
                half.with_key(parts, state),
                None,  # keys come with the micro-batches
                step,
                ends.hidden[bucket],
                ends.gradient[bucket],
                codecs[bucket],
                ahead=run.local.max_in_flight,
            )
            if choice.is_probed(step):
                codecs[bucket] = choice.probe_source(
                    step, half, state, batch.at(step), ends, codecs[bucket]
                )
            # This side's loss is that of lengths, if they are predicted; the target's
            # that of translations.
            metrics = {"tokens": batch.tokens(step)}
            if agreed.objective == "cmlm":
                metrics["loss"] = length_loss
            state, metrics = context.compute(step, half.apply, state, grads, metrics)
            context.record.step(step, metrics)
            if agreed.is_evaluated(step):
                params = half.params(state)
                with context.evaluating():
                    evaluation.send(agreed, text, encode, params, step, ends.evaluation)
            saved.after(step, {"state": state, "codecs": codecs}, choice.position)
        saved.at_end(context.step, {"state": state, "codecs": codecs}, choice.position)
        # The target may still want what was sent last.
        link.wait_for_step(context.step)
        described = {"outages": link.outages, "width": own.plm.model.config.width}
        context.finish(
            sides.described(link, text, state) | described | choice.described
        )
    return context.exit_status()


def prepare(run: config.Run, context: context_lib.Context) -> sides.Side:
    """Reads model and text of this side, and opens its checkpoints."""
    plm = models.load_source(run)
    text = data.read(run, config.side_dir(run.local), plm.tokenizer, is_translated=True)
    digests = {"source_model": plm.digest, "source_text": data.digest(run, text)}
    return sides.opened(run, context, plm, text, digests)


def begin(
    run: config.Run,
    context: context_lib.Context,
    own: sides.Side,
    link: all_clusters.AnyLink,
) -> sides.Begun:
    """Opens all channels, restores the common step, sends what crosses only once.

    Args:
      run: of this process.
      context: of its loop, which begins.
      own: from `prepare`.
      link: to the target.
    """
    agreed, text, width = run.agreed, own.text, own.plm.model.config.width
    own.saved.add_fingerprints(sides.peer_fingerprints(link.peer))
    choice = control.Control(agreed, width, context.folder)
    target = sides.peer_model(link.peer)
    half = models.source_half(run, own.plm, target, choice.codecs)
    # All that crosses, as one table.
    ends = channels.open_ends(agreed, link, "source", len(text.train), width)
    # The target names the newest step that both sides have saved.
    start = context.wait_for_welcome(link)
    if agreed.bottleneck and start == 0:
        beginning = bottleneck.of_text(run, own.plm, text, half.task.config.target)
        beginning = bottleneck.send(ends.bottleneck, beginning)
        half = models.begun(run, own.plm, half, models.SOURCE, beginning)
    arrays, position = own.saved.restore(start, channels.fresh(agreed, half, width))
    choice.resume(position)
    buckets = batches.row_buckets(agreed, text)
    lengths = exchange_lengths(ends, buckets)
    order = batches.schedule(agreed, buckets)
    context.begin(start, [link])
    batch = batches.Source(agreed, half.mesh, text, order, lengths)
    return sides.Begun(half, choice, ends, batch, arrays["state"], arrays["codecs"])


def exchange_lengths(ends: channels.Ends, buckets: np.ndarray) -> np.ndarray:
    """Sends the buckets of this side's rows, receives the lengths of the target's.

    Args:
      ends: of the source cluster.
      buckets: [N] uint8.

    Returns:
      [N] int32, tokens of each target row; 0 with the objective `ar`.
    """
    ends.buckets.send(0, buckets)
    if ends.lengths is None:
        return np.zeros(len(buckets), np.int32)
    return np.asarray(ends.lengths.recv(0))
