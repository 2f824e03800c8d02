"""The models of an M3 run: what they begin with, and the encoder that is left.

With --hot_start (section 4.1) generators and discriminator begin with the same encoder:
a generator with its first layers, the discriminator with all of them. Its tokenizer is
the vocabulary, trimmed to the text and with M3's five control pieces first; heads are
new. The encoder that the discriminator has become is written as a checkpoint folder,
for `finetune_xnli --encoder=` or for `transformers`; pieces that were trimmed away have
the rows they came with. (Of a run from scratch, transformers reads the model; it has no
tokenizer for a vocabulary that was trained here.)

V pieces of the run, D width.
"""

import dataclasses
import functools
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import shared_flags
from experiments.m3 import config as m3_config
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import config_json
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import m3

ENCODER = "encoder"
"""The folder of the encoder that is left, in its cluster's."""


class Models(NamedTuple):
    """What all clusters of a run know of its models."""

    config: m3.Config
    generator: dict[str, Any] | None
    """`embeddings` and `encoder` to begin with; None for random ones."""
    discriminator: dict[str, Any] | None
    """The same."""


def load(vocabulary: vocabularies.Vocabulary) -> Models:
    """The flags as M3's models.

    Args:
      vocabulary: of the run.

    Raises:
      NebulaError: if --hot_start cannot be had, or the vocabulary is not of it.
    """
    if not m3_config.HOT_START.value:
        if vocabulary.rows is not None:
            raise shared_flags.FlagError(
                f"--vocabulary={vocabulary.path} is a pretrained model's tokenizer:"
                " name the model with --hot_start"
            )
        return Models(
            _config(
                _random(vocabulary, m3_config.GENERATOR_SIZE.value),
                _random(vocabulary, m3_config.DISCRIMINATOR_SIZE.value),
            ),
            None,
            None,
        )
    check()
    whole = _whole(max_length=m3_config.MAX_LENGTH.value)
    trimmed = _with_rows(whole, rows_of(vocabulary, whole))
    of_generator, of_discriminator = _layers(whole.config)
    generator = pretrained.first_layers(trimmed, of_generator)
    discriminator = pretrained.first_layers(trimmed, of_discriminator)
    return Models(
        _config(generator.config, discriminator.config),
        generator.params,
        discriminator.params,
    )


def check() -> None:
    """Raises NebulaError if --hot_start has not what is asked of it."""
    layers = (m3_config.GENERATOR_LAYERS, m3_config.DISCRIMINATOR_LAYERS)
    if not m3_config.HOT_START.value:
        for flag in layers:
            if flag.value:
                raise shared_flags.FlagError(
                    f"--{flag.name}={flag.value} is for --hot_start; without it"
                    " --generator_size and --discriminator_size count"
                )
        return
    folder = m3_config.hot_start_folder()
    about = checkpoint_folder.read_config(folder)
    _, config = config_json.read(about, folder / checkpoint_folder.CONFIG)
    if config.embedding_width:
        raise shared_flags.FlagError(
            f"--hot_start={m3_config.HOT_START.value}: its embeddings are narrower than"
            " its layers; the heads of eq. 6 and 10 are tied to embeddings as wide"
        )
    for flag, wanted, there in (
        ("generator_layers", m3_config.GENERATOR_LAYERS.value, config.layers),
        ("discriminator_layers", m3_config.DISCRIMINATOR_LAYERS.value, config.layers),
        ("max_length", m3_config.MAX_LENGTH.value, config.max_length),
    ):
        if wanted > there:
            raise shared_flags.FlagError(
                f"--{flag}={wanted}: --hot_start={m3_config.HOT_START.value} has"
                f" {there}"
            )


def rows_of(
    vocabulary: vocabularies.Vocabulary, whole: pretrained.Pretrained
) -> np.ndarray:
    """[V] integers, the row of --hot_start's table that is each piece's.

    Raises:
      NebulaError: if the vocabulary is not of --hot_start's tokenizer, or that is not
        its model's.
    """
    words = tokenizers.load(m3_config.hot_start_folder())
    pretrained.check_tokenizer(whole, words)
    is_its = vocabulary.rows is not None
    if is_its:
        own = tokenizers.load(vocabulary.path)
        is_its = own.library.pieces == words.library.pieces and np.all(
            np.isin(vocabulary.rows, words.old_ids)
        )
    if not is_its:
        raise shared_flags.FlagError(
            f"--vocabulary={vocabulary.path} is not the tokenizer of"
            f" --hot_start={m3_config.HOT_START.value} (python -m"
            " scripts.train_vocabulary --hot_start=... makes one)"
        )
    # Both count from the library's pieces, of which a trimmed checkpoint has some.
    return np.searchsorted(words.old_ids, vocabulary.rows)


def describe(models: Models) -> dict[str, Any]:
    """What a summary says of the models."""
    return {
        "hot_start": m3_config.HOT_START.value,
        **{
            name: {"layers": config.layers, "width": config.width}
            for name, config in (
                ("generator", models.config.generator),
                ("discriminator", models.config.discriminator),
            )
        },
    }


def place_generator(mesh: Mesh, models: Models, index: int) -> mesh_lib.ShardedInit:
    """Generator `index` at step 0, planned on the mesh."""
    seed, start = shared_flags.SEED.value, models.generator
    init = functools.partial(m3.init_generator, models.config, seed, index, start)
    return _placed(mesh, models, init)


def place_discriminator(mesh: Mesh, models: Models) -> mesh_lib.ShardedInit:
    """The discriminator at step 0, planned on the mesh."""
    seed, start = shared_flags.SEED.value, models.discriminator
    init = functools.partial(m3.init_discriminator, models.config, seed, start)
    return _placed(mesh, models, init)


def place_whole(mesh: Mesh, models: Models, generators: int) -> mesh_lib.ShardedInit:
    """(all generators, the discriminator) at step 0, planned on the mesh."""
    config, seed = models.config, shared_flags.SEED.value

    def init():
        own = (
            m3.init_generator(config, seed, index, models.generator)
            for index in range(generators)
        )
        return tuple(own), m3.init_discriminator(config, seed, models.discriminator)

    return _placed(mesh, models, init)


def _placed(mesh: Mesh, models: Models, init) -> mesh_lib.ShardedInit:
    is_given = models.generator is not None
    return (
        mesh_lib.sharded_init_from_arrays(mesh, init)
        if is_given
        else mesh_lib.sharded_init(mesh, init)
    )


def export(
    folder: pathlib.Path,
    models: Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the discriminator's encoder as a checkpoint folder with its tokenizer.

    Args:
      folder: replaced if it is there.
      models: of the run.
      vocabulary: likewise.
      params: of the discriminator; its heads are left out.
    """
    params = jax.device_get({part: params[part] for part in ("embeddings", "encoder")})
    with checkpoint_folder.replacing(folder) as new:
        if m3_config.HOT_START.value:
            pretrained.save(new, _grafted(models, vocabulary, params))
            tokenizers.save(new, tokenizers.load(m3_config.hot_start_folder()))
        else:
            # Our encoder has ELECTRA's form, when its embeddings are as wide as it is.
            config = models.config.discriminator
            pretrained.save(new, pretrained.Pretrained("electra", config, params, {}))
            shutil.copyfile(vocabulary.path, new / tokenizers.readers.SPIECE)


def _grafted(
    models: Models, vocabulary: vocabularies.Vocabulary, params: Any
) -> pretrained.Pretrained:
    """--hot_start, all of its pieces and positions, with what was trained of it."""
    whole = _whole()
    layers = _layers(whole.config)[1]
    embeddings = jax.tree.map(np.array, params["embeddings"])
    for table, rows in (
        ("word_embeddings", rows_of(vocabulary, whole)),
        ("position_embeddings", slice(_positions(models.config.discriminator))),
    ):
        known = np.array(whole.params["embeddings"][table]["embedding"])
        known[rows] = embeddings[table]["embedding"]
        embeddings[table] = {"embedding": known}
    left = {"embeddings": embeddings, "encoder": params["encoder"]}
    if "pooler" in whole.params and layers == whole.config.layers:
        left["pooler"] = whole.params["pooler"]  # not trained, but still its top
    config = dataclasses.replace(whole.config, layers=layers)
    return whole._replace(config=config, params=left)


def _positions(config: transformer.Config) -> int:
    return config.position_offset + config.max_length


def _whole(max_length: int | None = None) -> pretrained.Pretrained:
    """--hot_start, all of its pieces."""
    return pretrained.load(
        m3_config.hot_start_folder(),
        dropout=m3_config.DROPOUT.value,
        dtype=m3_config.DTYPE.value,
        max_length=max_length,
    )


def _layers(whole: transformer.Config) -> tuple[int, int]:
    """Of a generator and of the discriminator."""
    quarter = max(1, whole.layers // 4)
    return (
        m3_config.GENERATOR_LAYERS.value or quarter,
        m3_config.DISCRIMINATOR_LAYERS.value or whole.layers,
    )


def _with_rows(model: pretrained.Pretrained, rows: np.ndarray) -> pretrained.Pretrained:
    """The model with rows [V] of its table, in this order."""
    embeddings = dict(model.params["embeddings"])
    table = embeddings["word_embeddings"]["embedding"]
    embeddings["word_embeddings"] = {"embedding": table[rows]}
    config = dataclasses.replace(model.config, vocab_size=len(rows))
    return model._replace(
        config=config, params=model.params | {"embeddings": embeddings}
    )


def _random(vocabulary: vocabularies.Vocabulary, size: str) -> transformer.Config:
    return transformer.config_of_size(
        size,
        vocab_size=vocabulary.size,
        max_length=m3_config.MAX_LENGTH.value,
        dropout=m3_config.DROPOUT.value,
        dtype=m3_config.DTYPE.value,
    )


def _config(
    generator: transformer.Config, discriminator: transformer.Config
) -> m3.Config:
    return m3.Config(
        generator=generator,
        discriminator=discriminator,
        steps=shared_flags.STEPS.value,
        mask_rate=m3_config.MASK_RATE.value,
        mask_policy=m3_config.MASK_POLICY.value,
        temperature=m3_config.TEMPERATURE.value,
        rtd_weight=m3_config.RTD_WEIGHT.value,
        clm_weight=m3_config.CLM_WEIGHT.value,
        learning_rate=m3_config.LEARNING_RATE.value,
        warmup_steps=m3_config.WARMUP_STEPS.value,
        weight_decay=m3_config.WEIGHT_DECAY.value,
        clip_norm=m3_config.CLIP_NORM.value,
    )
