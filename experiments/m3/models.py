"""The models that an M3 run begins with.

With --hot_start (section 4.1) generators and discriminator begin with the same encoder:
a generator with its first layers, the discriminator with all of them. With
--generator_start and --discriminator_start each side has its own.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from experiments.m3 import config
from experiments.pretraining import hot_start
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import trimming
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import RULES
from nebula_jax.training import m3, m3_steps


class Models(NamedTuple):
    """The models of a run, as all of its clusters have them."""

    config: m3.Config
    generator: dict[str, Any] | None
    """`embeddings` and `encoder` to begin with; None for random ones."""
    discriminator: dict[str, Any] | None
    """`embeddings` and `encoder` to begin with; None for random ones."""


def load(run: config.Run, vocabulary: vocabularies.Vocabulary) -> Models:
    """Returns the models that a run's configuration describes.

    Raises:
      NebulaError: if --hot_start cannot be had, or the vocabulary is not of it.
    """
    agreed, local = run.agreed, run.local
    with_starts = local.of_generator(), local.of_discriminator()
    if with_starts[0].hot_start:
        config.check(run)
    small, large = (hot_start.load(agreed, each, vocabulary) for each in with_starts)
    if small is None or large is None:
        generator, discriminator = (
            hot_start.shape_of_size(agreed, local, size, layers, vocabulary.size)
            for size, layers in (
                (agreed.generator_size, agreed.generator_layers),
                (agreed.discriminator_size, agreed.discriminator_layers),
            )
        )
        return Models(config.model(agreed, generator, discriminator), None, None)
    of_generator, of_discriminator = layers(run, small.config, large.config)
    small = trimming.first_layers(small, of_generator)
    large = trimming.first_layers(large, of_discriminator)
    return Models(
        config.model(agreed, small.config, large.config), small.params, large.params
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
        return mesh_lib.sharded_init(
            mesh, _drawn(models.config), np.uint32(seed), np.int32(index)
        )
    init = functools.partial(
        m3.init_generator, models.config, seed, index, models.generator
    )
    return mesh_lib.sharded_init_from_arrays(mesh, init)


@functools.cache
def _drawn(config: m3.Config) -> Callable[..., Any]:
    """Returns (seed, index) -> a generator with random weights; always the same one."""
    return functools.partial(m3.init_generator, config)


def discriminator_init(mesh: Mesh, models: Models, seed: int) -> mesh_lib.ShardedInit:
    """Returns the discriminator at step 0, planned on the mesh."""
    init = functools.partial(
        m3.init_discriminator, models.config, seed, models.discriminator
    )
    if models.discriminator is None:
        return mesh_lib.sharded_init(mesh, init)
    return mesh_lib.sharded_init_from_arrays(mesh, init)


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
    hot_start.write(
        folder,
        run.agreed,
        run.local.of_discriminator(),
        models.config.discriminator,
        vocabulary,
        ranks.to_root(params),
        run.agreed.groups(),
    )
