"""The source cluster of ABNet: reads X, sends H^E, receives the gradient in it.

N training examples, D width of PLM-S.
"""

import functools
from typing import Any

import numpy as np

from experiments import configuration
from experiments.abnet import (
    batches,
    bottleneck,
    channels,
    config,
    control,
    data,
    evaluation,
    hello,
    meeting,
    models,
    pairs,
    replicas,
    staleness,
)
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.data import example_alignment
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace, pipeline
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import cut


def train(run: config.Run) -> int:
    """Trains the source side to the end; returns the exit status."""
    agreed, local = run.agreed, run.local
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(local.stuck_timeout, trace=trace)
    cluster.watch(work, interrupt)
    plm = models.load_source(run)
    text = data.of_source(run, plm.tokenizer, work)
    width = plm.model.config.width

    fingerprints = {"source_model": plm.digest, "source_text": data.digest(run, text)}
    saved = checkpoints.Checkpoints(
        local.workdir,
        local.cluster,
        configuration.settings(agreed),
        agreed.checkpoint_every,
        agreed.window(),
        fingerprints=fingerprints,
        work=work,
    )
    folder = run_folder.of_cluster(local.workdir, local.cluster)
    if ranks.is_root():
        configuration.write_run_flags(folder, run)
    examples = example_alignment.fingerprint(text.ids, data.id_key(run))
    greeting = hello.hello(run, saved.steps, plm.model.config, examples, fingerprints)
    check = functools.partial(data.check_same_examples, run, text)
    with (
        text.session,
        meeting.meet(run, greeting, check, work) as met,
    ):
        link = met.link
        saved.add_fingerprints(hello.peer_fingerprints(link.peer))
        choice = control.Control(agreed, width, folder)
        half = models.source_half(run, plm, hello.peer_model(link.peer), choice.in_use)
        encode = evaluation.encoder(agreed, half.task)
        ends = channels.open_ends(agreed, link, "source", len(text.train), width)
        member = replicas.member(agreed, local.cluster, half, folder)
        rounds = replicas.Rounds(agreed, [member], local.cluster, met.side)
        start = met.start()
        if agreed.rank and start == 0:
            beginning = bottleneck.of_text(run, plm, text, half.task.config.target)
            beginning = bottleneck.send(ends.bottleneck, beginning)
            half = bottleneck.narrowed_source(run, plm, half, beginning)
        new_codecs = channels.init_codecs(agreed, half.program, width)
        fresh = mesh_lib.sharded_init_with_codecs(half.fresh, half.mesh, new_codecs)
        fresh = replicas.planned(fresh, half.mesh, member)
        fresh = staleness.planned(agreed, fresh)
        restored, position = saved.restore(start, fresh)
        state, codecs = restored["state"], restored["codecs"]
        rounds.go_on([restored], [position])
        choice.go_on(position)
        under_way = staleness.under_way(
            agreed, half, local.max_in_flight, start, restored
        )
        del restored
        buckets = batches.row_buckets(agreed, text)
        target_lengths = exchange_lengths(ends, buckets)
        replica = pairs.replica_of(local.cluster)
        order = batches.Schedule(agreed, buckets, replica)
        text.begin(order, start, agreed.steps, agreed.staleness)
        record = progress.Progress(
            *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
            *(met.links, work),
            allow_nonfinite=local.allow_nonfinite,
        )
        saved.before_save = record.settle
        saved.after_save = connect.recorder(local.connection(), local.cluster).saved

        def arrays() -> dict[str, Any]:
            return {
                **{"state": state, "codecs": codecs},
                **rounds.arrays(),
                **staleness.arrays(under_way, step, codecs),
            }

        def position_now() -> Any:
            return rounds.position() or choice.position

        interrupt.is_graceful = True
        step = start
        steps = pace.follow(
            *(link, start, agreed.steps, agreed.staleness),
            lambda: interrupt.requested() or text.end is not None,
        )
        for step in trace.each("wait", ranks.in_step(steps)):
            choice.begin(step)
            with trace.span("next batch", step=step):
                text.next_batch()
                bucket, micro_batches = batches.source_batch(
                    agreed, half.mesh, text, order, target_lengths, step
                )
            grads, codecs[bucket], length_loss = pipeline.front_step(
                *(half.program, half.params(state)),
                *(half.with_key(micro_batches, state), None),
                *(step, ends.hidden[bucket], ends.gradient[bucket], codecs[bucket]),
                grads=cut.zero_grads(state.params),
                ahead=local.max_in_flight,
                under_way=under_way,
            )
            if choice.is_probed(step):
                _, again = batches.source_batch(
                    agreed, half.mesh, text, order, target_lengths, step
                )
                first = next(half.with_key(again, state))
                codecs[bucket] = choice.probe_source(
                    step, half, state, first, ends, bucket, codecs[bucket]
                )
            metrics = {"loss": length_loss, "tokens": tokens(text, order, step)}
            with trace.span("compute", step=step):
                state, metrics = trace.ready(half.apply(state, grads, metrics))
            [state], _ = rounds.after(step, [state])
            if step == agreed.steps:
                [state] = rounds.finish(step, [state])
            record.step(step, metrics)
            if agreed.is_evaluated(step) and replica == 0:
                params = half.params(state)
                with work.busy(activity.Activity.EVALUATING):
                    evaluation.send(agreed, text, encode, params, step, ends.evaluation)
            if agreed.is_saved_after(step):
                saved.save(step, arrays(), position_now())
        saved.at_end(step, arrays(), position_now)
        link.wait_for_step(step)
        described = {
            "ledger": link.ledger,
            "text": data.describe(text),
            "width": width,
            "trained_parameters": models.trained_parameters(state),
            "outages": link.outages,
            **met.described(rounds.described),
            **choice.described,
        }
        record.finish(step, described)
    if text.end is not None:
        process.message(str(text.end))
    return interrupt.exit_status(local.cluster, step, agreed.steps)


def exchange_lengths(ends: channels.Ends, buckets: np.ndarray) -> np.ndarray:
    """Sends the buckets of this side's rows, receives the lengths of the target's.

    Args:
      ends: of the source cluster.
      buckets: [N] uint8.

    Returns:
      [N] int32, tokens of each target row; 0 with the objective `ar`.
    """
    ends.buckets.send(0, buckets)
    if ends.lengths is None:
        return np.zeros(len(buckets), np.int32)
    return np.asarray(ends.lengths.recv(0))


def tokens(text: data.Text, order: batches.Schedule, step: int) -> np.float32:
    """Returns how many tokens the source's rows of a step have."""
    return np.float32(text.train.lengths[order.batch(step - 1).indices].sum())
