"""The discriminator of M3: receive from every generator, step, send the step token."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from experiments.m3 import channels, config, models, probes
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import m3_predictions


def train(run: config.Run) -> int:
    """Trains the discriminator to the end; returns the exit status."""
    agreed, context = run.agreed, config.context(run, part=1)
    vocabulary = shared_vocabulary.given(run.local)
    made = models.load(run, vocabulary)
    mesh = devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)
    fresh = models.discriminator_init(mesh, made, agreed.seed)
    batch_at = mesh_lib.batch_sharding(mesh)
    train_step = models.discriminator_step(mesh, made, fresh)
    predict = predictor(agreed, made, mesh, fresh)
    probe = probes.Probes(run, made, vocabulary, mesh, fresh)

    settings = config.settings(run, vocabulary)
    saved = run.open_checkpoints(context, settings)
    hello = run.hello(settings, saved.steps)
    with context.connected(hello, config.names(agreed), hub=hello.cluster) as peers:
        links = list(peers.links.values())
        # All that crosses: what the generators send; their step tokens go back.
        ends = [
            channels.receivers(
                link, made.config, agreed.batch_size, vocabulary.size, batch_at
            )
            for link in links
        ]
        start = context.agree_start(peers)
        state, _ = saved.restore(start, fresh)
        context.begin(start, links)
        if start == 0:
            probe.evaluate(context, 0, predict(0, ends, state.params), state.params, [])
        steps = context.lead(links)
        for step in context.each(steps):
            received = channels.received(ends, step, agreed.fan_out)
            with context.trace.span("compute", step=step):
                state, metrics = context.trace.ready(train_step(state, received))
                # The token promises that this step is done: it waits for the device,
                # and leaves before anything is recorded, so that generators resume.
                jax.block_until_ready(metrics)
                context.emulate_compute()
            steps.done(step)
            context.record.step(step, metrics)
            if agreed.is_evaluated(step):
                found = predict(step, ends, state.params)
                probe.evaluate(context, step, found, state.params, received)
            saved.after(step, state)
        saved.at_end(context.step, state)
        described = {"ledgers": {link.peer.cluster: link.ledger for link in links}}
        context.finish(described | {"models": models.describe(run, made)})
    if context.step >= agreed.steps:
        models.export(context.folder, run, made, vocabulary, state.params)
    return context.exit_status()


def predictor(
    agreed: config.Agreed,
    made: models.Models,
    mesh: jax.sharding.Mesh,
    fresh: mesh_lib.ShardedInit,
) -> Callable[..., Iterator[tuple[str, m3_predictions.Predictions]]]:
    """Compiles the predictions on held-out text, as the generators corrupt it.

    Returns (step, ends, parameters) -> language and predictions of each batch.
    """
    orders = [text.held_out_order(agreed, group) for group in agreed.groups()]
    predict = jax.jit(
        functools.partial(m3_predictions.predict, made.config),
        in_shardings=(fresh.sharding.params, mesh_lib.batch_sharding(mesh)),
        out_shardings=mesh_lib.replicated(mesh),
    )

    def predictions(step: int, ends: Sequence[channels.Ends], params: Any) -> Any:
        for end, order in zip(ends, orders, strict=True):
            for micro_batch, (language, _) in enumerate(order):
                yield language, predict(params, end.held_out.recv(step, micro_batch))

    return predictions
