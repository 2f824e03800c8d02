"""The target cluster of ABNet: reads Y, receives H^E, sends the gradient in it.

N training examples.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
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
    target_model,
)
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import session
from nebula_jax.parallel import pipeline
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters


def train(run: config.Run) -> int:
    """Trains the target side to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    own = prepare(run, context)
    text, saved = own.text, own.saved
    with context.listen(own.hello, ["source"], check=own.check) as [link]:
        half, choice, ends, batch, state, codecs = begin(run, context, own, link)
        decode = evaluation.decoder(agreed, half.task)
        steps = context.lead([link])
        for step in context.each(steps):
            with context.trace.span("next batch", step=step):
                bucket, parts = batch.at(step)
            # H^E of each micro-batch comes; the gradient in it is the answer.
            grads, codecs[bucket], metrics = pipeline.back_step(
                half.program,
                half.params(state),
                half.with_key(parts, state),
                None,  # keys come with the micro-batches
                step,
                ends.hidden[bucket],
                ends.gradient[bucket],
                codecs[bucket],
            )
            check_alignment(step, metrics)  # waits for the device, as the token should
            if choice.is_probed(step):
                codecs[bucket] = choice.probe_target(
                    step, half, state, batch.at(step), ends, codecs[bucket]
                )
            # The token leaves before the step is taken: the source goes on meanwhile.
            steps.done(step)
            metrics = step_metrics(metrics)
            state, metrics = context.compute(step, half.apply, state, grads, metrics)
            context.record.step(step, metrics)
            if agreed.is_evaluated(step):
                params = half.params(state)
                with context.evaluating():
                    figures = evaluation.evaluate(
                        run, text, decode, params, step, ends.evaluation
                    )
                context.record.evaluation(step, figures)
            saved.after(step, {"state": state, "codecs": codecs}, choice.position)
        saved.at_end(context.step, {"state": state, "codecs": codecs}, choice.position)
        context.finish(sides.described(link, text, state) | choice.described)
    return context.exit_status()


def prepare(run: config.Run, context: context_lib.Context) -> sides.Side:
    """Makes PLM-T ready, reads text, and opens the checkpoints of this side."""
    side_dir = config.side_dir(run.local)
    if ranks.is_root():
        target_model.prepare(run, side_dir)
    ranks.agree(0)  # the cluster's other processes go on when it is there
    plm = target_model.load(run)
    text = data.read(run, side_dir, plm.tokenizer, is_translated=False)
    digests = {
        "target_model": target_model.fingerprint(run),
        "target_text": data.digest(run, text),
    }
    return sides.opened(run, context, plm, text, digests)


def begin(
    run: config.Run,
    context: context_lib.Context,
    own: sides.Side,
    link: all_clusters.AnyLink,
) -> sides.Begun:
    """Opens all channels to the source, and restores the step that both have saved.

    Args:
      run: of this process.
      context: of its loop, which begins.
      own: from `prepare`.
      link: to the source.
    """
    agreed, text = run.agreed, own.text
    own.saved.add_fingerprints(sides.peer_fingerprints(link.peer))
    source = sides.peer_model(link.peer)
    is_trained = target_model.is_trained(run.local)
    choice = control.Control(agreed, source.width)
    half = models.target_half(run, own.plm, source, is_trained, choice.codecs)
    # All that crosses, as one table.
    ends = channels.open_ends(agreed, link, "target", len(text.train), source.width)
    start = context.welcome([link], own.saved)
    if agreed.bottleneck and start == 0:
        beginning = bottleneck.receive(ends.bottleneck)
        half = models.begun(run, own.plm, half, models.TARGET, beginning)
    fresh = channels.fresh(agreed, half, source.width)
    arrays, position = own.saved.restore(start, fresh)
    choice.resume(position)
    order = batches.schedule(agreed, exchange_lengths(ends, text))
    context.begin(start, [link])
    batch = batches.Target(agreed, half.mesh, text, order)
    return sides.Begun(half, choice, ends, batch, arrays["state"], arrays["codecs"])


def exchange_lengths(ends: channels.Ends, text: data.Text) -> np.ndarray:
    """Receives the buckets of the source's rows, sends the lengths of this side's.

    Args:
      ends: of the target cluster.
      text: of the target side.

    Returns:
      [N] uint8.
    """
    buckets = np.asarray(ends.buckets.recv(0))
    if ends.lengths is not None:
        ends.lengths.send(0, text.train.lengths)
    return buckets


def check_alignment(step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Checks that the hidden states of a step were of this side's examples.

    Raises:
      session.RemoteProtocolError: if not.
    """
    if float(metrics["mismatched_examples"]):
        raise session.RemoteProtocolError(
            f"source sent hidden states of other examples than step {step} has: the two"
            " sides order their examples differently"
        )


def step_metrics(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns what is recorded of a step's metrics; accuracy is per prediction."""
    predicted = jnp.maximum(metrics["predicted"], 1.0)
    return {
        "loss": metrics["loss"],
        "tokens": metrics["tokens"],
        "accuracy": metrics["correct"] / predicted,
        "dropped_targets": metrics["dropped_targets"],
    }
