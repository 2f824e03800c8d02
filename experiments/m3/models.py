"""The models that an M3 run begins with.

With --init_from they are those of an earlier run, heads too. With --hot_start (section
4.1) all begin with the same encoder: a generator with its first layers, the
discriminator with all. --generator_start and --discriminator_start give each its own.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from experiments.m3 import config
from experiments.pretraining import hot_start
from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import trimming
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import RULES
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import checkpoint_files, m3, m3_steps


class Models(NamedTuple):
    """The models of a run, as all of its clusters have them."""

    config: m3.Config
    generator: dict[str, Any] | None  # `embeddings` and `encoder`; None if random
    discriminator: dict[str, Any] | None  # `embeddings` and `encoder`; None if random
    earlier: pathlib.Path | None = None  # run that all parts begin with, heads too
    step: int = 0

    def begun(self, fresh: mesh_lib.ShardedInit, part: str) -> mesh_lib.ShardedInit:
        """Returns a part's first state, with the parameters of an earlier run's."""
        if self.earlier is None:
            return fresh
        return checkpoints.begun_with(fresh, self.earlier, part, self.step)


def load(run: config.Run, vocabulary: vocabularies.Vocabulary) -> Models:
    """Returns the models that a run's configuration describes.

    Raises errors.NebulaError if --hot_start or --init_from cannot be had, or the
    vocabulary is not of it.
    """
    found = _described(run, vocabulary)
    if not run.local.init_from:
        return found
    earlier, step = pathlib.Path(run.local.init_from), config.earlier_step(run)
    found = found._replace(earlier=earlier, step=step)
    # A run that has saved a step needs the earlier one no more, which may have gone on.
    if config.begun_step(run) is not None:
        return found
    cluster = run.local.cluster
    part = "discriminator" if cluster in ("all", "whole") else cluster
    about = checkpoint_files.about(checkpoints.folder_of(earlier, part), step)
    if about["settings"].get("vocabulary") != vocabulary.digest[:16]:
        raise errors.SettingsError(
            f"--vocabulary={vocabulary.path} is not that of --init_from={earlier},"
            " whose run.flags names it"
        )
    return found


def _described(run: config.Run, vocabulary: vocabularies.Vocabulary) -> Models:
    """Returns the models that begin with random weights, or with --hot_start."""
    agreed, local = run.agreed, run.local
    with_starts = local.of_generator(), local.of_discriminator()
    if with_starts[0].hot_start:
        config.check(run)
    small, large = (hot_start.load(agreed, each, vocabulary) for each in with_starts)
    if small is None or large is None:
        return Models(config.model(agreed, *of_sizes(run, vocabulary.size)), None, None)
    of_generator, of_discriminator = layers(run, small.config, large.config)
    small = trimming.first_layers(small, of_generator)
    large = trimming.first_layers(large, of_discriminator)
    return Models(
        config.model(agreed, small.config, large.config), small.params, large.params
    )


def of_sizes(
    run: config.Run, vocab_size: int
) -> tuple[transformer.Config, transformer.Config]:
    """Returns the shapes of both models that begin with random weights."""
    agreed = run.agreed
    generator, discriminator = (
        hot_start.shape_of_size(agreed, run.local, size, layers, vocab_size)
        for size, layers in (
            (agreed.generator_size, agreed.generator_layers),
            (agreed.discriminator_size, agreed.discriminator_layers),
        )
    )
    return generator, dataclasses.replace(
        discriminator, disentangled=agreed.disentangled
    )


def layers(
    run: config.Run, small: transformer.Config, large: transformer.Config
) -> tuple[int, int]:
    """Returns the layers of a generator and the discriminator, given their starts."""
    has_own = bool(run.local.generator_start)
    most = small.layers if has_own else max(1, small.layers // 4)
    return (
        run.agreed.generator_layers or most,
        run.agreed.discriminator_layers or large.layers,
    )


def describe(run: config.Run, models: Models) -> dict[str, Any]:
    """Returns what a summary has of the models."""
    local = run.local
    return {
        "hot_start": local.of_discriminator().hot_start,
        "generator_start": local.of_generator().hot_start,
        **({"init_from": local.init_from} if local.init_from else {}),
        **{
            name: {"layers": config.layers, "width": config.width}
            for name, config in (
                ("generator", models.config.generator),
                ("discriminator", models.config.discriminator),
            )
        },
    }


def generator_init(
    mesh: Mesh, models: Models, seed: int, index: int
) -> mesh_lib.ShardedInit:
    """Returns generator `index` at step 0, planned on the mesh."""
    if models.generator is None:
        # Numbers that differ are arguments: all generators are of one program.
        fresh = mesh_lib.sharded_init(
            mesh, _drawn(models.config), np.uint32(seed), np.int32(index)
        )
    else:
        init = functools.partial(
            m3.init_generator, models.config, seed, index, models.generator
        )
        fresh = mesh_lib.sharded_init_from_arrays(mesh, init)
    return models.begun(fresh, f"generator:{index}")


@functools.cache
def _drawn(config: m3.Config) -> Callable[..., Any]:
    """Returns (seed, index) -> a generator with random weights; always the same one."""
    return functools.partial(m3.init_generator, config)


def discriminator_init(mesh: Mesh, models: Models, seed: int) -> mesh_lib.ShardedInit:
    """Returns the discriminator at step 0, planned on the mesh."""
    init = functools.partial(
        m3.init_discriminator, models.config, seed, models.discriminator
    )
    drawn = models.discriminator is None
    planned = mesh_lib.sharded_init if drawn else mesh_lib.sharded_init_from_arrays
    return models.begun(planned(mesh, init), "discriminator")


def discriminator_step(
    mesh: Mesh, models: Models, fresh: mesh_lib.ShardedInit
) -> Callable[..., Any]:
    """Compiles (state, tokens of every micro-batch) -> (next state, metrics)."""
    step = functools.partial(m3_steps.discriminator_step, models.config)
    return mesh_lib.jit_step(step, mesh, RULES, fresh.shapes)


def export(
    folder: pathlib.Path,
    run: config.Run,
    models: Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the discriminator's encoder and tokenizer into its cluster's folder."""
    shape, params = models.config.discriminator, ranks.to_root(params)
    if shape.disentangled and ranks.is_root():
        shape = dataclasses.replace(shape, disentangled=False)
        params = params | {"embeddings": _summed(params["embeddings"])}
    hot_start.write(
        folder,
        run.agreed,
        run.local.of_discriminator(),
        shape,
        vocabulary,
        params,
        run.agreed.groups(),
    )


def _summed(embeddings: dict[str, Any]) -> dict[str, Any]:
    """Returns disentangled embeddings with one table, as the encoder reads them."""
    summed = dict(embeddings)
    deltas = summed.pop("word_deltas")["embedding"]
    table = summed["word_embeddings"]["embedding"] + deltas
    return summed | {"word_embeddings": {"embedding": table}}
