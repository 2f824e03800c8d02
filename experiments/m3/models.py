"""The models that an M3 run begins with.

With --hot_start (section 4.1) generators and discriminator begin with the same encoder:
a generator with its first layers, the discriminator with all of them. Its tokenizer is
the vocabulary, trimmed to the text and with M3's five control pieces first; heads are
new.

V pieces of the run, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from experiments.m3 import config
from nebula_jax import errors
from nebula_jax.data import tokenizers
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
    agreed = run.agreed
    if not run.local.hot_start:
        if vocabulary.rows is not None:
            raise errors.SettingsError(
                f"--vocabulary={vocabulary.path} is a pretrained model's tokenizer:"
                " name the model with --hot_start"
            )
        generator, discriminator = (
            transformer.config_of_size(
                size,
                layers,
                vocab_size=vocabulary.size,
                max_length=agreed.max_length,
                dropout=agreed.dropout,
                dtype=agreed.dtype,
                remat=run.local.remat,
                pipeline=run.local.pipeline,
            )
            for size, layers in (
                (agreed.generator_size, agreed.generator_layers),
                (agreed.discriminator_size, agreed.discriminator_layers),
            )
        )
        return Models(config.model(agreed, generator, discriminator), None, None)
    config.check(run)
    whole = whole_encoder(run, max_length=agreed.max_length)
    rows = rows_of(run.local, vocabulary, whole)
    trimmed = pretrained.select_rows(whole, rows)
    of_generator, of_discriminator = layers(agreed, whole.config)
    first = pretrained.first_layers(trimmed, of_generator)
    all_of_it = pretrained.first_layers(trimmed, of_discriminator)
    return Models(
        config.model(agreed, first.config, all_of_it.config),
        first.params,
        all_of_it.params,
    )


def rows_of(
    local: config.Local,
    vocabulary: vocabularies.Vocabulary,
    whole: pretrained.Pretrained,
) -> np.ndarray:
    """Returns [V] integers, the row of --hot_start's table of each piece.

    Raises:
      NebulaError: if the vocabulary is not of --hot_start's tokenizer, or that is not
        its model's.
    """
    tokenizer = tokenizers.load(config.hot_start_folder(local))
    pretrained.check_tokenizer(whole, tokenizer)
    is_its = vocabulary.rows is not None
    if is_its:
        trimmed = tokenizers.load(vocabulary.path)
        is_its = trimmed.library.pieces == tokenizer.library.pieces and np.all(
            np.isin(vocabulary.rows, tokenizer.old_ids)
        )
    if not is_its:
        raise errors.SettingsError(
            f"--vocabulary={vocabulary.path} is not the tokenizer of"
            f" --hot_start={local.hot_start} (python -m scripts.train_vocabulary"
            " --hot_start=... makes one)"
        )
    # Both count from the library's pieces, of which a trimmed checkpoint has some.
    return np.searchsorted(tokenizer.old_ids, vocabulary.rows)


def whole_encoder(
    run: config.Run, max_length: int | None = None
) -> pretrained.Pretrained:
    """Returns --hot_start with all of its pieces."""
    whole = pretrained.load(
        config.hot_start_folder(run.local),
        dropout=run.agreed.dropout,
        dtype=run.agreed.dtype,
        max_length=max_length,
    )
    local = run.local
    shape = dataclasses.replace(
        whole.config, remat=local.remat, pipeline=local.pipeline
    )
    return whole._replace(config=shape)


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
