"""The encoder that a pre-training run begins with (section 4.1): --hot_start.

Its tokenizer is the run's vocabulary, trimmed to the text and with the five control
pieces of pre-training first; heads are new.

V pieces of the run, D width.
"""

import functools
import pathlib
from collections.abc import Mapping

import numpy as np

from experiments.pretraining import config
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import config_json, packages
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.runtime.life import process


def folder(local: config.Local) -> pathlib.Path:
    """Returns the checkpoint folder of --hot_start, fetched if need be.

    Raises:
      errors.NebulaError: if it cannot be had.
    """
    return _resolved(local.hot_start, local.pretrained_dir)


@functools.cache  # a package's files are hashed each time: half a gigabyte
def _resolved(name: str, pretrained_dir: pathlib.Path) -> pathlib.Path:
    return packages.resolve_checkpoint(name, pretrained_dir, process.message)


def digest(local: config.Local) -> str:
    """Returns a digest of --hot_start's files."""
    return _digest(folder(local))


_digest = functools.cache(checkpoint_folder.digest)


def check(local: config.Local, heads: str, wanted: Mapping[str, int]) -> None:
    """Checks --hot_start, if it is given, by its config.json alone.

    Args:
      heads: the heads that are tied to its embeddings, for an error.
      wanted: flag -> layers or positions that it must have; `max_length` of positions.

    Raises:
      errors.NebulaError: if it cannot be had, or cannot be begun with.
    """
    if not local.hot_start:
        return
    there = folder(local)
    about = checkpoint_folder.read_config(there)
    _, shape = config_json.read(about, there / checkpoint_folder.CONFIG)
    if shape.embedding_width:
        raise errors.SettingsError(
            f"--hot_start={local.hot_start}: its embeddings are narrower than its"
            f" layers; {heads} tied to embeddings as wide"
        )
    for name, number in wanted.items():
        most = shape.max_length if name == "max_length" else shape.layers
        if number > most:
            raise errors.SettingsError(
                f"--{name}={number}: --hot_start={local.hot_start} has {most}"
            )


def load(
    agreed: config.Agreed, local: config.Local, vocabulary: vocabularies.Vocabulary
) -> pretrained.Pretrained | None:
    """Returns --hot_start with the run's pieces and positions; None without it.

    Raises:
      errors.NebulaError: if --hot_start cannot be had, or the vocabulary is not of it.
    """
    if not local.hot_start:
        if vocabulary.rows is not None:
            raise errors.SettingsError(
                f"--vocabulary={vocabulary.path} is a pretrained model's tokenizer:"
                " name the model with --hot_start"
            )
        return None
    whole = read(agreed, local, max_length=agreed.max_length)
    return pretrained.select_rows(whole, rows_of(local, vocabulary, whole))


def shape_of_size(
    agreed: config.Agreed, local: config.Local, size: str, layers: int, vocab_size: int
) -> transformer.Config:
    """Returns the shape of an encoder that begins with random weights.

    Args:
      size: key of `transformer.SIZES`.
      layers: how many; 0 for those of the size.
      vocab_size: V.
    """
    return transformer.config_of_size(
        size,
        layers,
        vocab_size=vocab_size,
        max_length=agreed.max_length,
        dropout=agreed.dropout,
        dtype=agreed.dtype,
        remat=local.remat,
        pipeline=local.pipeline,
    )


def read(
    agreed: config.Agreed, local: config.Local, max_length: int | None = None
) -> pretrained.Pretrained:
    """Returns --hot_start with all of its pieces.

    Args:
      max_length: positions to keep; all if None.
    """
    return pretrained.load(
        folder(local),
        dropout=agreed.dropout,
        dtype=agreed.dtype,
        remat=local.remat,
        pipeline=local.pipeline,
        max_length=max_length,
        log=process.message,
    )


def rows_of(
    local: config.Local,
    vocabulary: vocabularies.Vocabulary,
    whole: pretrained.Pretrained,
) -> np.ndarray:
    """Returns [V] integers, the row of --hot_start's table of each piece.

    Args:
      whole: --hot_start with all of its pieces.

    Raises:
      errors.NebulaError: if the vocabulary is not of --hot_start's tokenizer, or that
        is not its model's.
    """
    tokenizer = tokenizers.load(folder(local))
    pretrained.check_tokenizer(whole, tokenizer)
    rows = vocabulary.rows
    if (
        rows is None
        or tokenizers.load(vocabulary.path).library.pieces != tokenizer.library.pieces
        or not np.isin(rows, tokenizer.old_ids).all()
    ):
        raise errors.SettingsError(
            f"--vocabulary={vocabulary.path} is not the tokenizer of"
            f" --hot_start={local.hot_start} (python -m scripts.train_vocabulary"
            " --hot_start=... makes one)"
        )
    # Both count from the library's pieces, of which a trimmed checkpoint has some.
    return np.searchsorted(tokenizer.old_ids, rows)
