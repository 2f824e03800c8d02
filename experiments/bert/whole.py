"""A BERT run in one process: the copy of every cluster in turn, without a line.

The reference that a run over several clusters equals, to the last bit. Each copy is
saved where its own cluster saves it, so a run can begin here and go on over several
clusters, or the other way round.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bert import config, copies, data, evaluation, export, models, timing
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax import trace as trace_lib
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import pace
from nebula_jax.parallel.local_steps import rounds as rounds_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import partition


def train(run: config.Run) -> int:
    """Trains all copies to the end; returns the exit status."""
    agreed, local, names = run.agreed, run.local, config.names(run.agreed)
    timer = timing.Timer(agreed.seconds())
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(trace=trace)
    vocabulary = vocabularies.given(local)
    made = models.load(run, vocabulary)
    group = [copies.plan(run, made, index) for index in range(len(names))]
    shares = [data.share_of(agreed, index) for index in range(len(names))]
    texts = [data.text_of(run, index, vocabulary) for index in range(len(names))]
    members = [copy.member for copy in group if copy.member is not None]
    rounds = rounds_lib.LocalRounds(members) if members else None

    settings = config.settings(run, vocabulary)
    saved = [
        checkpoints.Checkpoints(
            *(local.workdir, name, settings),
            *(agreed.checkpoint_every, agreed.window()),
            work=work,
        )
        for name in names
    ]
    start = checkpoints.newest_of_all(
        {name: each.steps for name, each in zip(names, saved, strict=True)},
        *(agreed.checkpoint_every, agreed.window()),
    )
    states = []
    for copy, each, text, share in zip(group, saved, texts, shares, strict=True):
        arrays, position = each.restore(start, copy.fresh)
        states.append(copies.begin(copy, arrays, position, text, share, timer))
    record = progress.Progress(
        *(local.workdir, local.cluster, start, timer.shown(agreed.steps)),
        *(local.log_every, (), work),
        allow_nonfinite=local.allow_nonfinite,
    )
    saved[0].before_save = record.settle

    def evaluate(step: int) -> None:
        found: dict[str, Any] = {}
        # With one group of languages all have one text: the first copy stands for all.
        count = len(agreed.groups())
        with work.busy(activity.Activity.EVALUATING):
            for k in range(count):
                found |= evaluation.evaluate(group[k], states[k].params, texts[k])
        record.evaluation(step, found)

    def save(step: int) -> None:
        for copy, each, state, text in zip(group, saved, states, texts, strict=True):
            each.save(step, *copies.to_save(copy, state, text, timer))

    if start == 0:
        evaluate(0)
    interrupt.is_graceful = True
    step, is_stopping = start, False
    is_last = timer.has_ended(start, agreed.steps)
    steps = pace.alone(start, timer.most(agreed.steps), lambda: is_last or is_stopping)
    for step in steps:
        of_all = []
        for k, (copy, text, share) in enumerate(zip(group, texts, shares, strict=True)):
            with trace.span("next batch"):
                rows = next(text.batches)
                batch = copy.batch(rows, share.number, timer.progress(step))
            with trace.span("compute", step=step, part=names[k]):
                states[k], metrics = trace.ready(
                    copy.step(states[k], copy.frozen, *batch.inputs)
                )
            if copy.member is not None:
                copy.member.took(metrics["tokens"])
            of_all.append({**metrics, "left_out": batch.left_out})
        time.sleep(local.emulated_seconds())
        now = functools.partial(timer.now, interrupt.requested())
        if rounds is None:
            heads = timer.alone(step, interrupt.requested())
        else:
            trained, heads = rounds.after(step, [each.params for each in states], now)
            states = _with_params(states, trained)
        timer.agree(heads)
        is_stopping = any(head.is_stopping for head in heads)
        is_last = timer.is_last(step, agreed.steps)
        if is_last and rounds is not None:
            trained = rounds.finish(step, [each.params for each in states])
            states = _with_params(states, trained)
        record.step(step, _together(of_all))
        if is_last or step % agreed.eval_every == 0:
            evaluate(step)
        if is_last or is_stopping or copies.is_saved_after(agreed, step):
            save(step)
    described = {
        "models": models.describe(run, made),
        "clusters": len(names),
        "rounds": rounds.described if rounds is not None else {},
    }
    record.finish(step, described)
    if not is_last:
        return interrupt.exit_status(local.cluster, step, timer.most(agreed.steps))
    folder = run_folder.of_cluster(local.workdir, local.cluster) / export.FOLDER
    params = jax.device_get(partition.merge(states[0].params, group[0].frozen))
    export.write(folder, run, made, vocabulary, params)
    return 0


def _with_params(states: list[Any], trained: list[Any]) -> list[Any]:
    return [
        dataclasses.replace(state, params=params)
        for state, params in zip(states, trained, strict=True)
    ]


def _together(of_all: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the metrics of a step of all copies: means, and the sum of tokens."""
    found = {
        name: jnp.mean(jnp.stack([each[name] for each in of_all])) for name in of_all[0]
    }
    for name in ("tokens", "masked"):
        found[name] = sum(each[name] for each in of_all)
    found["is_finite"] = jnp.all(jnp.stack([each["is_finite"] for each in of_all]))
    return found
