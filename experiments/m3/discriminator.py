"""The discriminator of M3: receive from every generator, step, send the step token."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.m3 import channels, config, models, probes
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import m3, m3_predictions


def train(run: config.Run) -> int:
    """Trains the discriminator to the end; returns the exit status."""
    agreed, context = run.agreed, config.context(run, part=1)
    vocabulary = shared_vocabulary.given(run.local)
    made = models.load(run, vocabulary)
    mesh = devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)
    fresh = models.discriminator_init(mesh, made, agreed.seed)
    batch_at = mesh_lib.batch_sharding(mesh)
    train_step = models.discriminator_step(mesh, made, fresh)
    evaluate = evaluator(run, made, vocabulary, mesh, fresh)

    settings = config.settings(run, vocabulary)
    saved = context.open_checkpoints(settings)
    hello = run.hello(settings, saved.steps)
    names = [f"generator:{index}" for index in range(len(agreed.groups()))]
    with context.listen(hello, names) as links:
        # All that crosses: what the generators send; their step tokens go back.
        ends = [
            channels.receivers(
                link, made.config, agreed.batch_size, vocabulary.size, batch_at
            )
            for link in links
        ]
        start = context.welcome(links, saved)
        state, _ = saved.restore(start, fresh)
        context.begin(start, links)
        received: list[m3.Tokens] = []
        if start == 0:
            evaluate(context, 0, ends, state.params, received)
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
                evaluate(context, step, ends, state.params, received)
            saved.after(step, state)
        saved.at_end(context.step, state)
        described = {"ledgers": {link.peer.cluster: link.ledger for link in links}}
        context.finish(described | {"models": models.describe(run, made)})
    if context.step >= agreed.steps:
        models.export(context.folder, run, made, vocabulary, state.params)
    return context.exit_status()


def evaluator(
    run: config.Run,
    made: models.Models,
    vocabulary: vocabularies.Vocabulary,
    mesh: jax.sharding.Mesh,
    fresh: mesh_lib.ShardedInit,
) -> Callable[..., None]:
    """Prepares the evaluation on held-out text, as the generators corrupt it.

    Returns:
      A function of context, step, ends, parameters and the step's tokens, none before
      the first, that receives held-out text and records figures.
    """
    groups = run.agreed.groups()
    orders = [text.held_out_order(run.agreed, group) for group in groups]
    predict = jax.jit(
        functools.partial(m3_predictions.predict, made.config),
        in_shardings=(fresh.sharding.params, mesh_lib.batch_sharding(mesh)),
        out_shardings=mesh_lib.replicated(mesh),
    )
    probe = probes.Probes(run, made, vocabulary, mesh, fresh)

    def predictions(step: int, ends: Sequence[channels.Ends], params: Any) -> Any:
        for end, order in zip(ends, orders, strict=True):
            for micro_batch, (language, _) in enumerate(order):
                yield language, predict(params, end.held_out.recv(step, micro_batch))

    def evaluate(
        context: context_lib.Context,
        step: int,
        ends: Sequence[channels.Ends],
        params: Any,
        received: Sequence[m3.Tokens],
    ) -> None:
        found = predictions(step, ends, params)
        probe.evaluate(context, step, found, params, received)

    return evaluate
