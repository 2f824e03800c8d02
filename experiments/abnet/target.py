"""The target cluster of ABNet: reads Y, receives H^E, sends the gradient in it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from experiments.abnet import config, evaluation, models, sides
from nebula_jax.communication.wire import session
from nebula_jax.parallel import pipeline


def train(run: config.Run) -> int:
    """Trains the target side to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    own = sides.prepare(run, context, models.TARGET)
    text, saved = own.text, own.saved
    with context.connected(own.hello, config.CLUSTERS, check=own.check) as peers:
        link = peers.links["source"]
        half, ends, batch, state, codecs = sides.begin(
            run, context, own, peers, models.TARGET
        )
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
            saved.after(step, {"state": state, "codecs": codecs})
        saved.at_end(context.step, {"state": state, "codecs": codecs})
        context.finish(sides.described(link, text, state))
    return context.exit_status()


def check_alignment(step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Raises session.RemoteProtocolError if hidden states were of other examples."""
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
