"""The discriminator of M3: receive from every generator, step, send the step token."""

import functools
import time

import jax

from experiments.m3 import channels, config, export, fan_out, models, probes
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.parallel.rules import RULES
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster, devices
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import m3, m3_predictions, m3_steps


def train(run: config.Run) -> int:
    """Trains the discriminator to the end; returns the exit status."""
    agreed, local, groups = run.agreed, run.local, run.agreed.groups()
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(local.stuck_timeout, trace=trace)
    cluster.watch(work, interrupt)
    vocabulary = shared_vocabulary.given(local)
    made = models.load(run, vocabulary)

    mesh = devices.mesh(local.layout(), agreed.batch_size, agreed.micro_batches)
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    fresh = models.discriminator_init(mesh, made, agreed.seed)
    predict = jax.jit(
        functools.partial(m3_predictions.predict, made.config),
        in_shardings=(fresh.sharding.params, batch_at),
        out_shardings=everywhere,
    )

    probe = probes.Probes(run, made, vocabulary, mesh, fresh)

    settings = config.settings(run, vocabulary)
    saved = checkpoints.Checkpoints(
        *(local.workdir, local.cluster, settings),
        *(agreed.checkpoint_every, agreed.window),
        work=work,
    )
    hello = config.hello(run, settings, saved.steps)
    names = [f"generator:{index}" for index in range(len(groups))]
    with connect.listen(local.connection(), hello, names, work=work) as links:
        ends = [
            channels.receivers(
                link, made.config, agreed.batch_size, vocabulary.size, batch_at
            )
            for link in links
        ]
        measured = [fan_out.discriminator_ends(agreed, link) for link in links]
        start = checkpoints.newest_of_all(
            {link.peer.cluster: link.peer.checkpoints for link in links}
            | {local.cluster: saved.steps},
            agreed.checkpoint_every,
            agreed.window,
        )
        for link in links:
            link.welcome(start)
        n = fan_out.in_discriminator(
            *(run, measured, start, saved.position(start)),
            *(made.config, mesh, fresh),
        )
        made = models.with_fan_out(made, n)
        train_step = mesh_lib.jit_step(
            functools.partial(m3_steps.discriminator_step, made.config),
            *(mesh, RULES, fresh.shapes),
        )
        state, _ = saved.restore(start, fresh)
        record = progress.Progress(
            *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
            *(links, work),
            allow_nonfinite=local.allow_nonfinite,
        )
        saved.before_save = record.settle
        saved.after_save = connect.recorder(local.connection(), local.cluster).saved
        received: list[m3.Tokens] = []

        def evaluate(step: int) -> None:
            found = rtd.RtdAccumulator()
            with work.busy(activity.Activity.EVALUATING):
                for end, group in zip(ends, groups, strict=True):
                    order = text.held_out_order(agreed, group)
                    for micro_batch, (language, _) in enumerate(order):
                        corrupted = end.held_out.recv(step, micro_batch)
                        found.add(language, predict(state.params, corrupted))
                figures = probe.measure(state.params, received)
            record.evaluation(step, found.report())
            record.probe(step, figures)

        def position() -> dict[str, int]:
            return {"fan_out": n}

        if start == 0:
            evaluate(0)
        _, emulated = local.emulated_seconds()
        interrupt.is_graceful = True
        step = start
        steps = pace.Lead(
            *(links, start, agreed.steps, agreed.window),
            *(interrupt.requested, process.message),
        )
        for step in trace.each("wait", ranks.in_step(iter(steps))):
            received[:] = [
                each for end in ends for each in end.tokens.recv_all(step, n)
            ]
            with trace.span("compute", step=step):
                state, metrics = trace.ready(train_step(state, received))
                jax.block_until_ready(metrics)  # the token means: this step is done
                time.sleep(emulated)
            steps.done(step)
            record.step(step, metrics)
            if agreed.is_evaluated(step):
                evaluate(step)
            saved.after(step, state, position)
        saved.at_end(step, state, position)
        described = models.describe(run, made)
        ledgers = {link.peer.cluster: link.ledger for link in links}
        record.finish(step, {"ledgers": ledgers, "models": described})
    if step >= agreed.steps:
        folder = run_folder.of_cluster(local.workdir, local.cluster) / export.FOLDER
        params = ranks.to_root(state.params)
        if ranks.is_root():
            export.write(folder, run, made, vocabulary, params)
    return interrupt.exit_status(local.cluster, step, agreed.steps)
