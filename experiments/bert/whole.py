"""A BERT run in one process: the replica of every cluster in turn, without a line.

The reference that a run over several clusters equals, to the last bit. Each replica is
saved where its own cluster saves it, so a run can begin here and resume over several
clusters, or the other way round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from experiments.bert import config, data, models, replica
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime import local_steps
from nebula_jax.runtime.records import checkpoints


def train(run: config.Run) -> int:
    """Trains all replicas to the end; returns the exit status."""
    agreed, names = run.agreed, config.names(run.agreed)
    context = config.context(run)
    vocabulary = vocabularies.given(run.local)
    made = models.load(run, vocabulary)
    group = [replica.plan(run, made, index) for index in range(len(names))]
    texts = [data.text_of(run, index, vocabulary) for index in range(len(names))]
    rounds = local_steps.in_one_process(context, names, group[0].specs, agreed.rounds())
    group = list(map(replica.Replica.in_rounds, group, rounds.members)) or group
    settings = config.settings(run, vocabulary)
    saved = [context.open_checkpoints(settings, part=name) for name in names]
    start = checkpoints.newest_of_all(
        {name: each.steps for name, each in zip(names, saved, strict=True)},
        agreed.checkpoint_every,
        agreed.window(),
    )
    rounds.report_growth(saved[0], start)
    states = [
        own.resume(*of_own.restore(start, own.fresh), text)
        for own, of_own, text in zip(group, saved, texts, strict=True)
    ]
    context.begin(start)
    if start == 0:
        evaluate(context, 0, run, group, states, texts)
    for step in context.each(rounds.steps()):
        metrics = []
        for k, (own, text) in enumerate(zip(group, texts, strict=True)):
            with context.trace.span("next batch"):
                batch = own.batch(next(text.batches))
            states[k], found = context.compute(
                step, own.step, states[k], own.frozen, *batch, part=names[k]
            )
            metrics.append(found)
        context.emulate_compute()
        params = rounds.after_all(step, [each.params for each in states])
        for k, mixed in enumerate(params):
            states[k] = dataclasses.replace(states[k], params=mixed)
        context.record.step(step, together(metrics))
        if rounds.is_last or step % agreed.eval_every == 0:
            evaluate(context, step, run, group, states, texts)
        if rounds.is_saved_after(step):
            for k, own in enumerate(group):
                saved[k].save(step, *own.to_save(states[k], texts[k]))
    described = {"models": models.describe(run, made), "rounds": rounds.described}
    context.finish(described | {"clusters": len(names)})
    if not rounds.is_last:
        return context.exit_status()
    models.export(context.folder, run, made, vocabulary, group[0].params(states[0]))
    return 0


def evaluate(
    context: context_lib.Context,
    step: int,
    run: config.Run,
    group: Sequence[replica.Replica],
    states: Sequence[Any],
    texts: Sequence[text_lib.Text],
) -> None:
    """Records the loss on held-out text after a step."""
    found: dict[str, Any] = {}
    with context.evaluating():
        # With one group all replicas have one text: the first stands for all.
        for k in range(len(run.agreed.groups())):
            found |= group[k].held_out(states[k].params, texts[k])
    context.record.evaluation(step, found)


def together(of_all: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the metrics of a step of all replicas: means, and the sum of tokens."""
    found = {
        name: jnp.mean(jnp.stack([each[name] for each in of_all])) for name in of_all[0]
    }
    for name in ("tokens", "masked"):
        found[name] = sum(each[name] for each in of_all)
    found["is_finite"] = jnp.all(jnp.stack([each["is_finite"] for each in of_all]))
    return found
