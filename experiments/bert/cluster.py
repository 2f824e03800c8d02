"""One cluster of a BERT run: inner steps, and now and then a round of a fragment."""

import dataclasses
import functools
import time

import jax

from experiments.bert import (
    channels,
    config,
    copies,
    data,
    evaluation,
    export,
    models,
    timing,
)
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import pace
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import partition


def train(run: config.Run) -> int:
    """Trains this cluster's copy to the end; returns the exit status."""
    agreed, local = run.agreed, run.local
    timer = timing.Timer(agreed.seconds())
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(local.stuck_timeout, trace=trace)
    cluster.watch(work, interrupt)
    vocabulary = vocabularies.given(local)
    made = models.load(run, vocabulary)
    index = config.index_of(agreed, local.cluster)
    copy = copies.plan(run, made, index)
    share = data.share_of(agreed, index)
    text = data.text_of(run, index, vocabulary, work)

    settings = config.settings(run, vocabulary)
    saved = checkpoints.Checkpoints(
        *(local.workdir, local.cluster, settings),
        *(agreed.checkpoint_every, agreed.window()),
        work=work,
    )
    compared = settings | data.same_text(run, text) | copies.layout(copy)
    hello = config.hello(run, compared, saved.steps)
    names = config.names(agreed)
    with (
        text,
        all_clusters.meet(
            *(local.connection(), hello, names),
            hub=agreed.hub,
            work=work,
            may_return=agreed.clusters > 1 and agreed.quorum > 0,
        ) as others,
    ):
        lines = list(others.links.values())
        last = timer.most(agreed.steps)
        rounds = channels.rounds(run, copy, others, lines, work, timer)
        start = channels.begin(run, others, rounds, saved.steps)
        is_behind = rounds is not None and rounds.step > start
        arrays, position = saved.restore(start, copy.fresh, is_behind)
        state = copies.begin(copy, arrays, position, text, share, timer)
        del arrays
        record = progress.Progress(
            *(local.workdir, local.cluster, start, timer.shown(agreed.steps)),
            *(local.log_every, lines, work),
            allow_nonfinite=local.allow_nonfinite,
        )
        saved.before_save = record.settle
        saved.after_save = connect.recorder(local.connection(), local.cluster).saved

        def evaluate(step: int) -> None:
            with work.busy(activity.Activity.EVALUATING):
                record.evaluation(step, evaluation.evaluate(copy, state.params, text))

        def save(step: int) -> None:
            saved.save(step, *copies.to_save(copy, state, text, timer))

        if start == 0:
            evaluate(0)
        interrupt.is_graceful = True
        step, is_stopping = start, False
        is_last = timer.has_ended(start, agreed.steps)
        steps = pace.Steps(start, last, lambda: is_last or is_stopping)
        for step in trace.each("wait", ranks.in_step(iter(steps))):
            with trace.span("next batch"):
                rows = next(text.batches)
                batch = copy.batch(rows, share.number, timer.progress(step))
            with trace.span("compute", step=step):
                state, metrics = trace.ready(
                    copy.step(state, copy.frozen, *batch.inputs)
                )
                if local.emulate_compute:
                    jax.block_until_ready(metrics)
                    time.sleep(local.emulated_seconds())
            is_requested = interrupt.requested() or text.end is not None
            if copy.member is not None:
                copy.member.took(metrics["tokens"])
            if rounds is None:
                heads = timer.alone(step, is_requested)
            else:
                now = functools.partial(timer.now, is_requested)
                [params], heads = rounds.after(step, [state.params], now)
                state = dataclasses.replace(state, params=params)
                if rounds.step > step:  # --quorum: too late for the rounds up to there
                    step = steps.skip_to(rounds.step)
                    state = state.at_step(step)
            timer.agree(heads)
            is_stopping = any(head.is_stopping for head in heads)
            is_last = timer.is_last(step, agreed.steps)
            if is_last and rounds is not None:
                [params] = rounds.finish(step, [state.params])
                state = dataclasses.replace(state, params=params)
            record.step(step, {**metrics, "left_out": batch.left_out})
            if is_last or step % agreed.eval_every == 0:
                evaluate(step)
            if is_last or is_stopping or copies.is_saved_after(agreed, step):
                save(step)
        described = {
            "models": models.describe(run, made),
            "ledgers": {name: link.ledger for name, link in others.links.items()},
            "rounds": rounds.described if rounds is not None else {},
        }
        record.finish(step, described)
    if text.end is not None:
        process.message(str(text.end))
    if is_last:
        folder = run_folder.of_cluster(local.workdir, local.cluster) / export.FOLDER
        params = ranks.to_root(partition.merge(state.params, copy.frozen))
        if ranks.is_root():
            export.write(folder, run, made, vocabulary, params)
        return 0
    return interrupt.exit_status(local.cluster, step, last)
