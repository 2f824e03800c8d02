"""M3 uncut: every generator and the discriminator as one model in one process.

The reference that the split run must equal, and the 1.0 of the paper's Table 3.
"""

import functools

import jax

from experiments import lifecycle, progress, saved, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from experiments.m3 import models as m3_models
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import m3


def run() -> int:
    """Trains all parts to the end; the exit status."""
    name = "whole"
    interrupt = lifecycle.Interrupt().install()
    vocabulary = m3_data.given_vocabulary()
    groups = m3_data.groups(m3_data.text_folder())
    texts = [m3_data.open_generator(k, vocabulary) for k in range(len(groups))]
    models = m3_models.load(vocabulary)
    config = models.config

    mesh = shared_flags.mesh()
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    placed = m3_models.place_whole(mesh, models, len(groups))
    train = jax.jit(
        functools.partial(m3.whole_step, config),
        in_shardings=(*placed.sharding, batch_at),
        out_shardings=(*placed.sharding, batch_at, everywhere, everywhere),
        donate_argnums=(0, 1),
    )

    @functools.partial(jax.jit, out_shardings=everywhere)
    def judge(generator, discriminator, rng, batch):
        corrupted = m3.corrupt(config, generator, rng, batch)
        return m3.predict(config, discriminator, corrupted)

    checkpoints = saved.Saved(name, m3_config.settings(vocabulary, groups))
    start = max([0, *checkpoints.steps])
    state, positions = checkpoints.restore(start, placed)
    for text, position in zip(texts, positions or [None] * len(texts), strict=True):
        text.go_to(position)
    record = progress.Progress(name, start)

    def evaluate(step: int) -> None:
        generators, discriminator = state
        judged = rtd.RtdAccumulator()
        for text, generator in zip(texts, generators, strict=True):
            for micro_batch, (language, batch) in enumerate(text.held_back()):
                rng = m3_data.held_back_rng(micro_batch)
                judged.add(
                    language, judge(generator.params, discriminator.params, rng, batch)
                )
        record.evaluation(step, judged.report())

    if start == 0:
        evaluate(0)
    interrupt.is_graceful = True
    step = start
    while step < shared_flags.STEPS.value and not interrupt.requested:
        step += 1
        batches = [jax.device_put(next(text.batches), batch_at) for text in texts]
        *state, _, of_generators, metrics = train(*state, batches)
        loss = metrics["loss"] + sum(each["loss"] for each in of_generators)  # eq. 11
        record.step(step, {**metrics, "loss": loss})
        if m3_config.is_evaluated(step):
            evaluate(step)
        if checkpoints.is_due(step):
            checkpoints.save(step, tuple(state), [text.position() for text in texts])
    if start < step and step not in checkpoints.steps:
        checkpoints.save(step, tuple(state), [text.position() for text in texts])
    record.finish(step, {"models": m3_models.describe(models)})
    if step >= shared_flags.STEPS.value:
        encoder = shared_flags.cluster_folder(name) / m3_models.ENCODER
        m3_models.export(encoder, models, vocabulary, state[1].params)
    return lifecycle.exit_status(step, interrupt)
