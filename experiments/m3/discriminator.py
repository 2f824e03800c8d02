"""The discriminator of M3: receive from every generator, step, send the step token."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from experiments.m3 import channels, config, models, probes
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.evaluation import rtd
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
    evaluation = Evaluation(run, made, vocabulary, mesh, fresh)

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
            evaluation.run(context, 0, ends, state.params, received)
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
                evaluation.run(context, step, ends, state.params, received)
            saved.after(step, state)
        saved.at_end(context.step, state)
        described = {"ledgers": {link.peer.cluster: link.ledger for link in links}}
        context.finish(described | {"models": models.describe(run, made)})
    if context.step >= agreed.steps:
        models.export(context.folder, run, made, vocabulary, state.params)
    return context.exit_status()


class Evaluation:
    """The evaluation on held-out text, as the generators corrupt it, and probes."""

    def __init__(
        self,
        run: config.Run,
        made: models.Models,
        vocabulary: vocabularies.Vocabulary,
        mesh: jax.sharding.Mesh,
        fresh: mesh_lib.ShardedInit,
    ) -> None:
        """Prepares the discriminator's predictions; compiles nothing yet."""
        self._orders = [
            text.held_out_order(run.agreed, group) for group in run.agreed.groups()
        ]
        self._predict = jax.jit(
            functools.partial(m3_predictions.predict, made.config),
            in_shardings=(fresh.sharding.params, mesh_lib.batch_sharding(mesh)),
            out_shardings=mesh_lib.replicated(mesh),
        )
        self._probe = probes.Probes(run, made, vocabulary, mesh, fresh)

    def run(
        self,
        context: context_lib.Context,
        step: int,
        ends: Sequence[channels.Ends],
        params: Any,
        received: Sequence[m3.Tokens],
    ) -> None:
        """Receives every generator's held-out text after a step, and records figures.

        `received` has the tokens of the step, none before the first.
        """
        found = rtd.RtdAccumulator()
        with context.evaluating():
            for end, order in zip(ends, self._orders, strict=True):
                for micro_batch, (language, _) in enumerate(order):
                    corrupted = end.held_out.recv(step, micro_batch)
                    found.add(language, self._predict(params, corrupted))
            figures = self._probe.measure(params, received)
        context.record.evaluation(step, found.report())
        context.record.probe(step, figures)
