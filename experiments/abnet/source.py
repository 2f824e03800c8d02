"""The source cluster of ABNet: reads X, sends H^E, receives the gradient in it.

X are the source sentences, H^E the hidden states of PLM-S, the frozen source model,
with adapters (section 3.2, Fig. 5).
"""

from experiments.abnet import config, evaluation, models, sides
from nebula_jax.parallel import pipeline


def train(run: config.Run) -> int:
    """Trains the source side to the end; returns the exit status."""
    agreed, context = run.agreed, run.context()
    own = sides.prepare(run, context, models.SOURCE)
    text, saved = own.text, own.saved
    with context.connected(own.hello, config.CLUSTERS, check=own.check) as peers:
        link = peers.links["target"]
        half, ends, batch, state, codecs = sides.begin(
            run, context, own, peers, models.SOURCE
        )
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
            saved.after(step, {"state": state, "codecs": codecs})
        saved.at_end(context.step, {"state": state, "codecs": codecs})
        # The target may still want what was sent last.
        link.wait_for_step(context.step)
        own_only = {"outages": link.outages, "width": own.plm.model.config.width}
        context.finish(sides.described(link, text, state) | own_only)
    return context.exit_status()
