"""The models that an M3 run begins with.

With --hot_start (section 4.1) generators and discriminator begin with the same encoder:
a generator with its first layers, the discriminator with all of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from experiments.m3 import config
from experiments.pretraining import hot_start
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import m3


class Models(NamedTuple):
    """The models of a run, as all of its clusters have them."""

    config: m3.Config
    generator: dict[str, Any] | None
    """`embeddings` and `encoder` to begin with; None for random ones."""
    discriminator: dict[str, Any] | None
    """`embeddings` and `encoder` to begin with; None for random ones."""


def load(run: config.Run, vocabulary: vocabularies.Vocabulary) -> Models:
    """Returns the models that a run's configuration describes.

    Args:
      run: of this process.
      vocabulary: of the run.

    Raises:
      NebulaError: if --hot_start cannot be had, or the vocabulary is not of it.
    """
    agreed, local = run.agreed, run.local
    if local.hot_start:
        config.check(run)
    trimmed = hot_start.load(agreed, local, vocabulary)
    if trimmed is None:
        generator, discriminator = (
            hot_start.shape_of_size(agreed, local, size, layers, vocabulary.size)
            for size, layers in (
                (agreed.generator_size, agreed.generator_layers),
                (agreed.discriminator_size, agreed.discriminator_layers),
            )
        )
        return Models(config.model(agreed, generator, discriminator), None, None)
    of_generator, of_discriminator = layers(agreed, trimmed.config)
    first = pretrained.first_layers(trimmed, of_generator)
    all_of_it = pretrained.first_layers(trimmed, of_discriminator)
    return Models(
        config.model(agreed, first.config, all_of_it.config),
        first.params,
        all_of_it.params,
    )


def with_fan_out(models: Models, fan_out: int) -> Models:
    """Returns the models with n micro-batches in a generator's step."""
    return models._replace(config=dataclasses.replace(models.config, fan_out=fan_out))


def layers(agreed: config.Agreed, whole: transformer.Config) -> tuple[int, int]:
    """Returns how many of --hot_start's layers a generator and a discriminator have."""
    quarter = max(1, whole.layers // 4)
    return (
        agreed.generator_layers or quarter,
        agreed.discriminator_layers or whole.layers,
    )


def describe(run: config.Run, models: Models) -> dict[str, Any]:
    """Returns what a summary has of the models."""
    return {
        "hot_start": run.local.hot_start,
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
    init = functools.partial(
        m3.init_generator, models.config, seed, index, models.generator
    )
    return _sharded(mesh, models, init)


def discriminator_init(mesh: Mesh, models: Models, seed: int) -> mesh_lib.ShardedInit:
    """Returns the discriminator at step 0, planned on the mesh."""
    init = functools.partial(
        m3.init_discriminator, models.config, seed, models.discriminator
    )
    return _sharded(mesh, models, init)


def _sharded(
    mesh: Mesh, models: Models, init: Callable[[], Any]
) -> mesh_lib.ShardedInit:
    if models.generator is None:
        return mesh_lib.sharded_init(mesh, init)
    return mesh_lib.sharded_init_from_arrays(mesh, init)
