"""The target cluster of ABNet: reads Y, receives H^E, sends the gradient in it.

N training examples.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
    target_model,
)
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity, session
from nebula_jax.data import example_alignment
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace, pipeline
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import cut


def train(run: config.Run) -> int:
    """Trains the target side to the end; returns the exit status."""
    agreed, local = run.agreed, run.local
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(local.stuck_timeout, trace=trace)
    cluster.watch(work, interrupt)
    side_dir = config.side_dir(local)
    if ranks.is_root():
        target_model.prepare(run, side_dir)
    ranks.agree(0)  # the others go on when it is there
    plm = target_model.load(run)
    text = data.read(run, side_dir, plm.tokenizer, is_translated=False)

    fingerprints = {
        "target_model": target_model.fingerprint(run),
        "target_text": data.digest(run, text),
    }
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
    with meeting.meet(run, greeting, check, work) as met:
        link = met.link
        saved.add_fingerprints(hello.peer_fingerprints(link.peer))
        source = hello.peer_model(link.peer)
        is_trained = target_model.is_trained(local)
        choice = control.Control(agreed, source.width)
        half = models.target_half(run, plm, source, is_trained, choice.in_use)
        decode = evaluation.decoder(agreed, half.task)
        ends = channels.open_ends(agreed, link, "target", len(text.train), source.width)
        member = replicas.member(agreed, local.cluster, half, folder)
        rounds = replicas.Rounds(agreed, [member], local.cluster, met.side)
        start = met.start()
        if agreed.rank and start == 0:
            beginning = bottleneck.receive(ends.bottleneck)
            half = bottleneck.narrowed_target(run, plm, half, is_trained, beginning)
        new_codecs = channels.init_codecs(agreed, half.program, source.width)
        fresh = mesh_lib.sharded_init_with_codecs(half.fresh, half.mesh, new_codecs)
        fresh = replicas.planned(fresh, half.mesh, member)
        restored, position = saved.restore(start, fresh)
        state, codecs = restored["state"], restored["codecs"]
        rounds.go_on([restored], [position])
        choice.go_on(position)
        del restored
        replica = pairs.replica_of(local.cluster)
        order = batches.Schedule(agreed, exchange_lengths(ends, text), replica)
        record = progress.Progress(
            *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
            *(met.links, work),
            allow_nonfinite=local.allow_nonfinite,
        )
        saved.before_save = record.settle
        saved.after_save = connect.recorder(local.connection(), local.cluster).saved

        def arrays() -> dict[str, Any]:
            return {"state": state, "codecs": codecs} | rounds.arrays()

        def position_now() -> Any:
            return rounds.position() or choice.position

        interrupt.is_graceful = True
        step = start
        ending = replicas.Ending(agreed, link, start, interrupt.requested)
        steps = pace.Lead(
            *([ending.follower], start, agreed.steps, agreed.staleness),
            *(ending.is_due, process.message),
        )
        for step in trace.each("wait", ranks.in_step(iter(steps))):
            choice.begin(step)
            with trace.span("next batch", step=step):
                bucket, micro_batches = batches.target_batch(
                    agreed, half.mesh, text, order, step
                )
            grads, codecs[bucket], metrics = pipeline.back_step(
                *(half.program, half.params(state)),
                *(half.with_key(micro_batches, state), None),
                *(step, ends.hidden[bucket], ends.gradient[bucket], codecs[bucket]),
                grads=cut.zero_grads(state.params),
            )
            check_alignment(step, metrics)  # waits for the device, as the token should
            if choice.is_probed(step):
                _, again = batches.target_batch(agreed, half.mesh, text, order, step)
                first = next(half.with_key(again, state))
                codecs[bucket] = choice.probe_target(
                    step, half, state, first, ends, bucket, codecs[bucket]
                )
            steps.done(step)
            with trace.span("compute", step=step):
                metrics = step_metrics(metrics)
                state, metrics = trace.ready(half.apply(state, grads, metrics))
            [state], heads = rounds.after(step, [state], ending.now)
            ending.take(step, heads)
            if step == agreed.steps:
                [state] = rounds.finish(step, [state])
            record.step(step, metrics)
            if agreed.is_evaluated(step) and replica == 0:
                params = half.params(state)
                with work.busy(activity.Activity.EVALUATING):
                    figures = evaluation.evaluate(
                        run, text, decode, params, step, ends.evaluation
                    )
                record.evaluation(step, figures)
            if agreed.is_saved_after(step):
                saved.save(step, arrays(), position_now())
        saved.at_end(step, arrays(), position_now)
        described = {
            "ledger": link.ledger,
            "text": data.describe(text),
            "trained_parameters": models.trained_parameters(state),
            **met.described(rounds.described),
            **choice.described,
        }
        record.finish(step, described)
    return interrupt.exit_status(local.cluster, step, agreed.steps)


def exchange_lengths(ends: channels.Ends, text: data.Text) -> np.ndarray:
    """Receives the buckets of the source's rows, sends the lengths of this side's.

    Args:
      ends: of the target cluster.
      text: of the target side.

    Returns:
      [N] uint8.
    """
    buckets = np.asarray(ends.buckets.recv(0))
    if ends.lengths is not None:
        ends.lengths.send(0, text.train.lengths)
    return buckets


def check_alignment(step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Checks that the hidden states of a step were of this side's examples.

    Raises:
      session.RemoteProtocolError: if not.
    """
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
