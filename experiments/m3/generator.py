"""One generator of M3: batch, step, send; never further ahead than the window.

B rows of a micro-batch, L length, n micro-batches of a step.
"""

import functools
import time

import jax

from experiments.m3 import channels, config, data, fan_out, models
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.channels import Sender
from nebula_jax.communication.wire import activity, spool
from nebula_jax.evaluation import unigrams
from nebula_jax.parallel import fan_out as fan_out_lib
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster, devices
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import m3, m3_predictions


def train(run: config.Run, index: int) -> int:
    """Trains generator `index` to the end; returns the exit status."""
    agreed, local = run.agreed, run.local
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(local.stuck_timeout, trace=trace)
    vocabulary = shared_vocabulary.given(local)
    cluster.watch(work, interrupt)
    made = models.load(run, vocabulary)

    mesh = devices.mesh(local.layout(), agreed.batch_size, agreed.micro_batches)
    text = data.text_of(run, index, vocabulary, work)
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    fresh = models.generator_init(mesh, made, agreed.seed, index)
    corrupt = jax.jit(
        functools.partial(m3_predictions.corrupt, made.config),
        in_shardings=(fresh.sharding.params, everywhere, batch_at),
        out_shardings=batch_at,
    )

    settings = config.settings(run, vocabulary)
    saved = checkpoints.Checkpoints(
        *(local.workdir, local.cluster, settings),
        *(agreed.checkpoint_every, agreed.window),
        work=work,
    )
    hello = config.hello(run, settings, saved.steps)
    kept = spool.Spool(
        spool.from_string(local.spool),
        run_folder.of_cluster(local.workdir, local.cluster),
    )
    with (
        text,
        connect.dial(
            local.connection(), hello, peer="discriminator", work=work, spool=kept
        ) as link,
    ):
        tokens, held_out = channels.senders(
            link, made.config, agreed.batch_size, vocabulary.size
        )
        measured = fan_out.generator_ends(agreed, link)
        start = ranks.agree(link.wait_for_welcome(local.connect_timeout))
        n = fan_out.in_generator(run, measured, start, made.config, mesh, fresh)
        made = models.with_fan_out(made, n)
        rows = n * agreed.batch_size
        train_step = fan_out_lib.generator_step(made.config, mesh, fresh)
        state, position = saved.restore(start, fresh)
        text.begin(position, rows, mesh_lib.rows_here(mesh, rows))
        record = progress.Progress(
            *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
            *([link], work),
            allow_nonfinite=local.allow_nonfinite,
        )
        saved.before_save = record.settle
        saved.after_save = connect.recorder(local.connection(), local.cluster).saved

        def send_held_out(step: int) -> None:
            with work.busy(activity.Activity.EVALUATING):
                for micro_batch, (_, batch) in enumerate(text.held_out()):
                    rng = text_lib.held_out_rng(micro_batch)
                    batch = mesh_lib.put(batch, batch_at)
                    held_out.send(step, corrupt(state.params, rng, batch), micro_batch)

        if start == 0:
            send_held_out(0)
        emulated, _ = local.emulated_seconds()
        frequencies = unigrams.Unigrams(vocabulary.size)
        interrupt.is_graceful = True
        step = start
        steps = pace.follow(
            *(link, start, agreed.steps, agreed.window),
            lambda: interrupt.requested() or text.end is not None,
        )
        for step in trace.each("wait", ranks.in_step(steps)):
            with trace.span("next batch"):
                ids = next(text.batches)
                frequencies.add(ids)
                batch = mesh_lib.put_rows(mesh, ids, rows)
            with trace.span("compute", step=step):
                send = functools.partial(_send, tokens, step, emulated)
                state, metrics = trace.ready(train_step(state, batch, send))
            record.step(step, metrics)
            if agreed.is_evaluated(step):
                send_held_out(step)
            saved.after(step, state, text.position)
        saved.at_end(step, state, text.position)
        link.wait_for_step(step)
        described = {"ledger": link.ledger, "outages": link.outages}
        record.finish(step, described | {"unigram_entropy": frequencies.entropy()})
    if text.end is not None:
        process.message(str(text.end))
    return interrupt.exit_status(local.cluster, step, agreed.steps)


def _send(
    channel: Sender, step: int, emulated: float, corrupted: m3.Tokens, number: int
) -> None:
    """Sends a micro-batch, after the seconds of --emulate_compute."""
    time.sleep(emulated)
    channel.send(step, corrupted, number)
