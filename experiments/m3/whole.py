"""M3 in one process: every generator and the discriminator, without a line.

The reference that the split run must equal, and the 1.0 of the paper's Table 3. Each
part is saved where its own cluster saves it, so that a run can begin here and resume
over several clusters, or the other way round, as the paper's did (Fig. 8).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.m3 import config, data, models, probes
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import fan_out
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import m3, m3_predictions


def train(run: config.Run) -> int:
    """Trains all parts to the end; returns the exit status."""
    agreed, context = run.agreed, config.context(run, part=0)
    names, count = config.names(agreed), len(agreed.groups())
    vocabulary = shared_vocabulary.given(run.local)
    texts = [data.text_of(run, k, vocabulary) for k in range(count)]
    made = models.load(run, vocabulary)
    mesh = devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)
    fresh = [models.discriminator_init(mesh, made, agreed.seed)]
    fresh += [models.generator_init(mesh, made, agreed.seed, k) for k in range(count)]
    generator_step = fan_out.generator_step(made.config, mesh, fresh[1])
    discriminator_step = models.discriminator_step(mesh, made, fresh[0])
    probe = probes.Probes(run, made, vocabulary, mesh, fresh[0])

    settings = config.settings(run, vocabulary)
    saved = [context.open_checkpoints(settings, part=name) for name in names]
    start, states = restored(run, names, saved, fresh, texts)
    context.begin(start)
    frequencies = [rtd.Unigrams(vocabulary.size) for _ in texts]
    sent: list[m3.Tokens] = []
    keep = functools.partial(keep_tokens, sent)
    evaluated = functools.partial(predictor(made.config, mesh), states, texts)
    if start == 0:
        probe.evaluate(context, 0, evaluated(), states[0].params, sent)
    for step in context.each(context.alone()):
        sent.clear()
        of_generators = []
        for k, text in enumerate(texts):
            with context.trace.span("next batch"):
                ids = next(text.batches)
                frequencies[k].add(ids)
                batch = mesh_lib.put_rows(mesh, ids, len(ids))
            states[k + 1], metrics = context.compute(
                step, generator_step, states[k + 1], batch, keep, part=names[k + 1]
            )
            of_generators.append(metrics)
        states[0], metrics = context.compute(
            step, discriminator_step, states[0], sent, part=names[0]
        )
        context.record.step(step, together(metrics, of_generators))
        if agreed.is_evaluated(step):
            probe.evaluate(context, step, evaluated(), states[0].params, sent)
        save(step, saved, states, texts, checkpoints.Checkpoints.after)
    save(context.step, saved, states, texts, checkpoints.Checkpoints.at_end)
    described = {"unigram_entropies": [each.entropy() for each in frequencies]}
    context.finish(described | {"models": models.describe(run, made)})
    if context.step >= agreed.steps:
        models.export(context.folder, run, made, vocabulary, states[0].params)
    return context.exit_status()


def restored(
    run: config.Run,
    names: Sequence[str],
    saved: Sequence[checkpoints.Checkpoints],
    fresh: Sequence[mesh_lib.ShardedInit],
    texts: Sequence[text_lib.Text],
) -> tuple[int, list[Any]]:
    """Returns the newest step that all parts have, and their states; texts begin there.

    The discriminator's part is the first; texts are of the others.
    """
    start = checkpoints.newest_of_all(
        {name: each.steps for name, each in zip(names, saved, strict=True)},
        run.agreed.checkpoint_every,
        run.agreed.window,
    )
    found = [each.restore(start, part) for each, part in zip(saved, fresh, strict=True)]
    rows = run.agreed.fan_out * run.agreed.batch_size
    for text, (_, position) in zip(texts, found[1:], strict=True):
        text.begin(position, rows)
    return start, [state for state, _ in found]


def keep_tokens(sent: list[m3.Tokens], tokens: m3.Tokens, number: int) -> None:
    """Keeps micro-batch `number` for the discriminator, in place of sending it."""
    sent.append(tokens)


def predictor(config: m3.Config, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Compiles the discriminator's predictions on held-out text.

    Returns (states, its own first; texts of the others) -> language and predictions of
    each batch.
    """
    predict = prediction(config, mesh)

    def of_all(states: Sequence[Any], texts: Sequence[text_lib.Text]) -> Any:
        for text, state in zip(texts, states[1:], strict=True):
            for micro_batch, (language, batch) in enumerate(text.held_out()):
                rng = text_lib.held_out_rng(micro_batch)
                found = predict(state.params, states[0].params, rng, batch)
                yield language, found

    return of_all


def prediction(config: m3.Config, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Compiles (generator, discriminator, key, [B, L] int32) -> predictions."""

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
    def predict(generator: Any, discriminator: Any, rng: Any, batch: Any) -> Any:
        corrupted = m3_predictions.corrupt(config, generator, rng, batch)
        return m3_predictions.predict(config, discriminator, corrupted)

    return predict


def together(
    discriminator: m3.Metrics, generators: Sequence[m3.Metrics]
) -> dict[str, jax.Array]:
    """Returns the metrics of a step of all parts; the loss is that of eq. 11."""
    found = {**discriminator}
    for k, each in enumerate(generators):
        found[f"generator_{k}_loss"] = each["loss"]
        found["is_finite"] &= each["is_finite"]
    found["loss"] += sum(each["loss"] for each in generators)
    return found


def save(
    step: int,
    saved: Sequence[checkpoints.Checkpoints],
    states: Sequence[Any],
    texts: Sequence[text_lib.Text],
    when: Callable[..., None],
) -> None:
    """Saves every part with its data position, `when` says if."""
    when(saved[0], step, states[0])
    for each, state, text in zip(saved[1:], states[1:], texts, strict=True):
        when(each, step, state, text.position)
