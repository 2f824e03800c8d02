"""A model of fewer rows or layers, and trained rows put back into the whole one."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained

SPECIAL_IDS = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep"))
"""Keys of config.json that are numbers of rows."""
OF_PIECES = ("embeddings/word_embeddings/embedding", "mlm_head/bias")
"""Parameters that have a row, or a number, for each piece of the vocabulary."""


def first_layers(model: pretrained.Pretrained, layers: int) -> pretrained.Pretrained:
    """Takes a model's embeddings and first layers (section 4.1's hot start), no heads.

    PretrainedError if there are fewer layers.
    """
    if not 1 <= layers <= model.config.layers:
        raise pretrained.PretrainedError(
            f"{layers} layers of a model that has {model.config.layers}"
        )
    above = {f"layer_{number}" for number in range(layers, model.config.layers)}
    encoder = model.params["encoder"].items()
    params = {
        "embeddings": model.params["embeddings"],
        "encoder": {name: part for name, part in encoder if name not in above},
    }
    config = dataclasses.replace(model.config, layers=layers)
    return model._replace(config=config, params=params)


def trim_to(
    model: pretrained.Pretrained, tokenizer: tokenizers.Tokenizer, counts: np.ndarray
) -> tuple[pretrained.Pretrained, tokenizers.Tokenizer, np.ndarray]:
    """Trims a model and its tokenizer to the pieces of a text.

    Of counts [N], how often each piece occurs (`tokenizers.count_pieces` of texts,
    `ragged_rows.count_pieces` of rows). Returns also the ids kept, [N'] int32,
    ascending: pieces that occur, and special tokens.
    """
    keep = tokenizers.kept_ids(tokenizer, np.flatnonzero(counts))
    return trim(model, keep), tokenizers.trim(tokenizer, keep), keep.astype(np.int32)


def trim(
    model: pretrained.Pretrained, keep_ids: Iterable[int]
) -> pretrained.Pretrained:
    """Keeps only some rows of the vocabulary; outputs on kept pieces are the same.

    `keep_ids` are as `tokenizers.kept_ids` gives them: the i-th smallest becomes id i.
    PretrainedError if the padding piece is not kept.
    """
    keep = np.unique(np.fromiter(keep_ids, np.int64))
    new_ids = {int(old): new for new, old in enumerate(keep)}
    metadata = dict(model.metadata)
    for key in SPECIAL_IDS:
        if metadata.get(key) is not None:
            if metadata[key] not in new_ids:
                raise pretrained.PretrainedError(
                    f"{key} {metadata[key]} is not among the rows kept"
                )
            metadata[key] = new_ids[metadata[key]]
    return select_rows(model, keep)._replace(metadata=metadata)


def select_rows(
    model: pretrained.Pretrained, rows: np.ndarray
) -> pretrained.Pretrained:
    """Selects rows [N] of the table and an MLM head's bias: rows[i] becomes id i."""
    flat = traverse_util.flatten_dict(model.params, sep="/")
    for path in OF_PIECES:
        if path in flat:
            flat[path] = np.asarray(flat[path])[rows]
    config = dataclasses.replace(model.config, vocab_size=len(rows))
    params = traverse_util.unflatten_dict(flat, sep="/")
    return model._replace(config=config, params=params)


def with_rows(
    model: pretrained.Pretrained, embeddings: Mapping[str, Any], rows: np.ndarray
) -> pretrained.Pretrained:
    """Puts embeddings that were trained with fewer rows back into the whole model.

    Of parameters of `transformer.Embeddings`, the N rows of `word_embeddings` go to
    `rows` [N] of the model's table, those of `position_embeddings` to its first ones.
    What was not trained stays. Raises PretrainedError if a table is another model's.
    """
    trained = jax.tree.map(np.asarray, dict(embeddings))
    places_of = {"word_embeddings": np.asarray(rows)}
    if "position_embeddings" in trained:
        positions = len(trained["position_embeddings"]["embedding"])
        places_of["position_embeddings"] = np.arange(positions)
    for name, places in places_of.items():
        table = np.array(model.params["embeddings"][name]["embedding"])
        new = trained[name]["embedding"]
        fits = len(places) == len(new) and table.shape[1:] == new.shape[1:]
        if not fits or (len(places) and places.max() >= len(table)):
            raise pretrained.PretrainedError(
                f"{name}: the table that was trained is another one's"
            )
        table[places] = new
        trained[name] = {"embedding": table}
    return model._replace(params=model.params | {"embeddings": trained})
