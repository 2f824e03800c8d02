"""M3 uncut: every generator and the discriminator as one model in one process.

The reference that the split run must equal, and the 1.0 of the paper's Table 3.
"""

import functools
from typing import Any

import jax

from experiments.m3 import config, data, export, models
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES
from nebula_jax.runtime import checkpoints, devices, process, progress, run_folder
from nebula_jax.training import m3, m3_steps


def train(run: config.Run) -> int:
    """Trains all parts to the end; returns the exit status."""
    agreed, local, groups = run.agreed, run.local, run.agreed.groups()
    interrupt = process.Interrupt().install()
    vocabulary = data.vocabulary(local)
    texts = [data.GeneratorText(run, k, vocabulary) for k in range(len(groups))]
    made = models.load(run, vocabulary)

    mesh = devices.mesh(local.layout(), agreed.batch_size, agreed.micro_batches)
    everywhere = mesh_lib.replicated(mesh)
    fresh = models.whole_init(mesh, made, agreed.seed, len(groups))
    train_step = mesh_lib.jit_step(
        functools.partial(m3_steps.whole_step, made.config),
        *(mesh, RULES, *fresh.shapes),
        outputs=(BATCH, REPLICATED, REPLICATED),
    )

    @functools.partial(jax.jit, out_shardings=everywhere)
    def predict(generator: Any, discriminator: Any, rng: Any, batch: Any) -> Any:
        corrupted = m3.corrupt(made.config, generator, rng, batch)
        return m3.predict(made.config, discriminator, corrupted)

    saved = checkpoints.Checkpoints(
        local.workdir,
        local.cluster,
        config.settings(run, vocabulary),
        agreed.checkpoint_every,
    )
    start = saved.newest
    state, positions = saved.restore(start, fresh)
    for text, position in zip(texts, positions or [None] * len(texts), strict=True):
        text.go_to(position)
    record = progress.Progress(
        *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
        allow_nonfinite=local.allow_nonfinite,
    )
    saved.before_save = record.settle

    def evaluate(step: int) -> None:
        generators, discriminator = state
        found = rtd.RtdAccumulator()
        for text, generator in zip(texts, generators, strict=True):
            for micro_batch, (language, batch) in enumerate(text.held_out()):
                rng = data.held_out_rng(micro_batch)
                predicted = predict(generator.params, discriminator.params, rng, batch)
                found.add(language, predicted)
        record.evaluation(step, found.report())

    def positions_now() -> list[Any]:
        return [text.position() for text in texts]

    if start == 0:
        evaluate(0)
    interrupt.is_graceful = True
    step = start
    for step in pace.alone(start, agreed.steps, interrupt.requested):
        batches = [
            mesh_lib.put_rows(mesh, next(text.batches), agreed.batch_size)
            for text in texts
        ]
        *state, _, of_generators, metrics = train_step(*state, batches)
        loss = metrics["loss"] + sum(each["loss"] for each in of_generators)  # eq. 11
        for each in of_generators:
            metrics["is_finite"] &= each["is_finite"]
        record.step(step, {**metrics, "loss": loss})
        if agreed.is_evaluated(step):
            evaluate(step)
        saved.after(step, tuple(state), positions_now)
    saved.at_end(step, tuple(state), positions_now)
    record.finish(step, {"models": models.describe(run, made)})
    if step >= agreed.steps:
        folder = run_folder.of_cluster(local.workdir, local.cluster) / export.FOLDER
        params = jax.device_get(state[1].params)
        export.write(folder, run, made, vocabulary, params)
    return interrupt.exit_status(local.cluster, step, agreed.steps)
