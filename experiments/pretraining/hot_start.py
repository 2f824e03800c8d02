"""The encoder that a run begins with (section 4.1), --hot_start, and the one it leaves.

The tokenizer of the former is the run's vocabulary, trimmed to the text and with the
five control pieces of pre-training first; heads are new. The latter is a checkpoint
folder, for `finetune_xnli --encoder=` or for `transformers`; with --hot_start, pieces
that were trimmed away have the rows they came with.

V pieces of the run, D width.
"""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.pretraining import config
from nebula_jax import errors, files
from nebula_jax.communication import ranks
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import config_json, trimming
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.runtime.life import process

FOLDER = "encoder"  # the encoder that a run leaves, in its cluster's folder


def folder(local: config.Local) -> pathlib.Path:
    """Returns the checkpoint folder of --hot_start, fetched if need be.

    Raises errors.NebulaError if it cannot be had.
    """
    return local.checkpoint(local.hot_start)


def digest(local: config.Local) -> str:
    """Returns a digest of --hot_start's files."""
    return _digest(folder(local))


_digest = functools.cache(checkpoint_folder.digest)


def check(
    agreed: config.Agreed, local: config.Local, heads: str, wanted: Mapping[str, int]
) -> None:
    """Checks --hot_start, if it is given, by its config.json alone.

    `heads`, for an error, are those tied to its embeddings. `wanted` is flag -> layers,
    or positions for `max_length`, that it must have. Raises errors.NebulaError if it
    cannot be had, or cannot be begun with.
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
    if (shape.body is None) != (transformer.BODIES[agreed.body] is None):
        raise errors.SettingsError(
            f"--hot_start={local.hot_start} has another form of layers than"
            f" --body={agreed.body}: give the other one of"
            f" {', '.join(transformer.BODIES)}"
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

    Raises errors.NebulaError if it cannot be had, or the vocabulary is not of it.
    """
    if not local.hot_start:
        if vocabulary.rows is not None:
            raise errors.SettingsError(
                f"--vocabulary={vocabulary.path} is a pretrained model's tokenizer:"
                " name the model with --hot_start"
            )
        return None
    whole = read(agreed, local, max_length=agreed.max_length)
    return trimming.select_rows(whole, rows_of(local, vocabulary, whole))


def shape_of_size(
    agreed: config.Agreed, local: config.Local, size: str, layers: int, vocab_size: int
) -> transformer.Config:
    """Returns the shape of an encoder that begins with random weights.

    `size` is a key of `transformer.SIZES`; 0 `layers` stand for those of the size.
    """
    return transformer.config_of_size(
        size,
        layers,
        transformer.BODIES[agreed.body],
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
    """Returns --hot_start with all pieces and `max_length` positions, all if None."""
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

    Raises errors.NebulaError if the vocabulary is not of --hot_start's tokenizer, or
    that is not its model's.
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


def write(
    of_cluster: pathlib.Path,
    agreed: config.Agreed,
    local: config.Local,
    shape: transformer.Config,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
    languages: Sequence[Sequence[str]],
) -> None:
    """Writes a trained encoder, its tokenizer and card; the root of the cluster does.

    FOLDER in `of_cluster` is replaced (`files.replacing`). Of `params`, on the root's
    host, heads are left out: with --hot_start all, else all but that of a masked
    language model.
    """
    if not ranks.is_root():
        return
    begun_with = pathlib.Path(local.hot_start).name or "random weights"
    names = ", ".join(language for group in languages for language in group)
    about = f"It began with {begun_with}, and was pre-trained for {agreed.steps:,}"
    about += f" steps on text in {names}."
    if not local.hot_start:
        write_own(of_cluster, shape, vocabulary, params, about)
        return
    whole = read(agreed, local)
    rows = rows_of(local, vocabulary, whole)
    left = _grafted(whole, rows, shape.layers, params)
    with files.replacing(of_cluster / FOLDER, process.message) as new:
        pretrained.save(new, left)
        tokenizers.save(new, tokenizers.load(folder(local)), left.config.max_length)
        pretrained.write_card(new, left, about)


def write_own(
    of_cluster: pathlib.Path,
    shape: transformer.Config,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
    about: str,
) -> None:
    """Writes a model that began with random weights, its tokenizer and card.

    FOLDER in `of_cluster` is replaced. The vocabulary is a sentencepiece model that was
    trained here. `params` are on the host; of their heads only that of a masked
    language model goes along.
    """
    parts = [name for name in ("embeddings", "encoder", "mlm_head") if name in params]
    own = {part: params[part] for part in parts}
    # Our encoder has ELECTRA's form, when its embeddings are as wide as it is.
    family = "electra" if shape.body is None else "modernbert"
    special = vocabularies.SPECIAL._asdict()
    metadata = {f"{name}_token_id": special[name] for name in ("pad", "cls", "sep")}
    left = pretrained.Pretrained(family, shape, own, metadata)
    with files.replacing(of_cluster / FOLDER, process.message) as new:
        pretrained.save(new, left)
        shutil.copyfile(vocabulary.path, new / tokenizers.readers.SPIECE)
        tokenizers.save(new, tokenizers.load(new), shape.max_length)
        pretrained.write_card(new, left, about)


def _grafted(
    whole: pretrained.Pretrained, rows: Any, layers: int, params: Any
) -> pretrained.Pretrained:
    """Returns --hot_start, all pieces and positions, with what was trained of it."""
    embeddings = trimming.with_rows(whole, params["embeddings"], rows).params
    left = {"embeddings": embeddings["embeddings"], "encoder": params["encoder"]}
    if "pooler" in whole.params and layers == whole.config.layers:
        left["pooler"] = whole.params["pooler"]  # not trained, but still its top
    shape = dataclasses.replace(whole.config, layers=layers)
    return whole._replace(config=shape, params=left)
