"""One cluster of a BERT run: inner steps, and now and then a round of a fragment.

What crosses is a message a round, from each cluster to all:

delta p of k    a round of fragment p             cluster k -> all others, or the hub

With --quorum the hub also sends each of the others what it decides:

delta p of k    as far as it came in time         hub -> all but k
verdict         the clusters that a round has     hub -> all others
anchor p        the state of fragment p           hub -> those that have missed rounds
"""

import dataclasses
from typing import Any

from experiments.bert import config, data, models, replica
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime import local_steps


def train(run: config.Run) -> int:
    """Trains this cluster's replica to the end; returns the exit status."""
    agreed, context = run.agreed, config.context(run)
    vocabulary = vocabularies.given(run.local)
    made = models.load(run, vocabulary)
    index = config.index_of(agreed, run.local.cluster)
    own = replica.plan(run, made, index)
    text = data.text_of(run, index, vocabulary, context.work)
    context.stop_when(lambda: text.end)
    settings = config.settings(run, vocabulary)
    saved = run.open_checkpoints(context, settings)
    hello = run.hello(settings | data.same_text(run, text), saved.steps)
    names, may_return = config.names(agreed), agreed.quorum > 0 and agreed.clusters > 1
    with (
        text,
        context.connected(hello, names, hub=agreed.hub, may_return=may_return) as peers,
    ):
        # All that crosses: the deltas of rounds, from each cluster to all others.
        rounds = local_steps.begin(context, peers, own.specs, agreed.rounds())
        own = own.in_rounds(*rounds.members) if rounds.members else own
        start, is_behind = rounds.agree_start(saved)
        arrays, position = saved.restore(start, own.fresh, is_behind)
        state = own.resume(arrays, position, text)
        del arrays  # the first anchor, which a round replaces
        context.begin(start, peers.lines)
        if start == 0:
            evaluate(context, 0, own, state, text)
        for step in context.each(rounds.steps()):
            with context.trace.span("next batch"):
                batch = own.batch(next(text.batches))
            state, metrics = context.compute(step, own.step, state, own.frozen, *batch)
            context.emulate_compute(metrics)
            # A fragment's delta leaves after its step; the mean is applied some later.
            params = rounds.after(step, state.params)
            if rounds.step > step:  # rounds went on without this cluster
                state = state.at_step(rounds.step)
            state, done = dataclasses.replace(state, params=params), rounds.step
            context.record.step(done, metrics)
            if rounds.is_last or done % agreed.eval_every == 0:
                evaluate(context, done, own, state, text)
            if rounds.is_saved_after(done):
                saved.save(done, *own.to_save(state, text))
        ledgers = {name: each.ledger for name, each in peers.links.items()}
        described = {"models": models.describe(run, made), "rounds": rounds.described}
        context.finish(described | {"ledgers": ledgers})
    if not rounds.is_last:
        return context.exit_status()
    models.export(context.folder, run, made, vocabulary, own.params(state))
    return 0


def evaluate(
    context: context_lib.Context,
    step: int,
    own: replica.Replica,
    state: Any,
    text: text_lib.Text,
) -> None:
    """Records the loss on held-out text after a step."""
    with context.evaluating():
        context.record.evaluation(step, own.held_out(state.params, text))
