"""M3 in one process: every generator and the discriminator, without a line.

The reference that the split run must equal, and the 1.0 of the paper's Table 3. Each
part is saved where its own cluster saves it, so that a run can begin here and go on
over several clusters, or the other way round, as the paper's did (Fig. 8).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from experiments.m3 import config, data, export, models, probes
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import trace as trace_lib
from nebula_jax.communication.wire import activity
from nebula_jax.evaluation import rtd, unigrams
from nebula_jax.parallel import fan_out, pace
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import RULES
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import m3, m3_predictions, m3_steps


def train(run: config.Run) -> int:
    """Trains all parts to the end; returns the exit status."""
    agreed, local, groups = run.agreed, run.local, run.agreed.groups()
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(trace=trace)
    vocabulary = shared_vocabulary.given(local)
    texts = [data.text_of(run, k, vocabulary) for k in range(len(groups))]
    made = models.load(run, vocabulary)

    n = int(agreed.fan_out)
    made, rows = models.with_fan_out(made, n), n * agreed.batch_size

    mesh = devices.mesh(local.layout(), agreed.batch_size, agreed.micro_batches)
    everywhere = mesh_lib.replicated(mesh)
    parts = [
        models.discriminator_init(mesh, made, agreed.seed),
        *(
            models.generator_init(mesh, made, agreed.seed, k)
            for k in range(len(groups))
        ),
    ]
    generator_step = fan_out.generator_step(made.config, mesh, parts[1])
    discriminator_step = mesh_lib.jit_step(
        functools.partial(m3_steps.discriminator_step, made.config),
        *(mesh, RULES, parts[0].shapes),
    )

    @functools.partial(jax.jit, out_shardings=everywhere)
    def predict(generator: Any, discriminator: Any, rng: Any, batch: Any) -> Any:
        corrupted = m3_predictions.corrupt(made.config, generator, rng, batch)
        return m3_predictions.predict(made.config, discriminator, corrupted)

    probe = probes.Probes(run, made, vocabulary, mesh, parts[0])

    settings = config.settings(run, vocabulary)
    names = ["discriminator", *(f"generator:{k}" for k in range(len(groups)))]
    saved = [
        checkpoints.Checkpoints(
            *(local.workdir, name, settings, agreed.checkpoint_every, agreed.window),
            work=work,
        )
        for name in names
    ]
    start = checkpoints.newest_of_all(
        {name: each.steps for name, each in zip(names, saved, strict=True)},
        *(agreed.checkpoint_every, agreed.window),
    )
    restored = [
        each.restore(start, part) for each, part in zip(saved, parts, strict=True)
    ]
    discriminator, *generators = [state for state, _ in restored]
    for text, (_, position) in zip(texts, restored[1:], strict=True):
        text.begin(position, rows)
    del restored
    record = progress.Progress(
        *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
        work=work,
        allow_nonfinite=local.allow_nonfinite,
    )
    saved[0].before_save = record.settle

    def evaluate(step: int) -> None:
        found = rtd.RtdAccumulator()
        with work.busy(activity.Activity.EVALUATING):
            for text, generator in zip(texts, generators, strict=True):
                params = generator.params, discriminator.params
                for micro_batch, (language, batch) in enumerate(text.held_out()):
                    rng = text_lib.held_out_rng(micro_batch)
                    found.add(language, predict(*params, rng, batch))
            figures = probe.measure(discriminator.params, sent)
        record.evaluation(step, found.report())
        record.probe(step, figures)

    def save(step: int, when: Callable[..., None]) -> None:
        states = (discriminator, *generators)
        positions = ({"fan_out": n}.copy, *(text.position for text in texts))
        for each, state, position in zip(saved, states, positions, strict=True):
            when(each, step, state, position)

    frequencies = [unigrams.Unigrams(vocabulary.size) for _ in texts]
    sent: list[m3.Tokens] = []
    if start == 0:
        evaluate(0)
    interrupt.is_graceful = True
    step = start
    for step in pace.alone(start, agreed.steps, interrupt.requested):
        of_generators = []
        sent.clear()
        for k, text in enumerate(texts):
            with trace.span("next batch"):
                ids = next(text.batches)
                frequencies[k].add(ids)
                batch = mesh_lib.put_rows(mesh, ids, rows)
            with trace.span("compute", step=step, part=names[k + 1]):
                generators[k], metrics = trace.ready(
                    generator_step(
                        *(generators[k], batch), lambda tokens, _: sent.append(tokens)
                    )
                )
            of_generators.append(metrics)
        with trace.span("compute", step=step, part=names[0]):
            discriminator, metrics = trace.ready(
                discriminator_step(discriminator, sent)
            )
        loss = metrics["loss"] + sum(each["loss"] for each in of_generators)  # eq. 11
        for each in of_generators:
            metrics["is_finite"] &= each["is_finite"]
        of_mlm = {
            f"generator_{k}_loss": each["loss"] for k, each in enumerate(of_generators)
        }
        record.step(step, {**metrics, "loss": loss, **of_mlm})
        if agreed.is_evaluated(step):
            evaluate(step)
        save(step, checkpoints.Checkpoints.after)
    save(step, checkpoints.Checkpoints.at_end)
    described = {
        "models": models.describe(run, made),
        "unigram_entropies": [each.entropy() for each in frequencies],
    }
    record.finish(step, described)
    if step >= agreed.steps:
        folder = run_folder.of_cluster(local.workdir, local.cluster) / export.FOLDER
        params = jax.device_get(discriminator.params)
        export.write(folder, run, made, vocabulary, params)
    return interrupt.exit_status(local.cluster, step, agreed.steps)
