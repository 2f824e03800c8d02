"""A pretrained model in memory, and what is cut out of it or put back.

V rows of the table (its pieces, and perhaps spare rows), P positions.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from nebula_jax.models import heads, transformer
from nebula_jax.models.pretrained import folder as checkpoint_folder

PretrainedError = checkpoint_folder.PretrainedError

PARTS = ("embeddings", "encoder", "pooler", "mlm_head", "rtd_head")
OPTIONAL = PARTS[2:]
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Keys of config.json that are numbers of rows."""


class Pretrained(NamedTuple):
    """A model in our parameter tree."""

    family: str
    """A key of `names.FAMILIES`: the names it has in a checkpoint."""
    config: transformer.Config
    params: dict[str, Any]
    """`embeddings`, `encoder`, and those of `mlm_head`, `rtd_head`, `pooler` that the
    model has; float32 numpy arrays, as the Flax modules of these names have them."""
    metadata: dict[str, Any]
    """config.json as it was read; {} for a model that was made here."""


def shapes(config: transformer.Config) -> dict[str, tuple[int, ...]]:
    """Maps the path of every parameter that a config's model can have to its shape."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.width), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    table = jax.ShapeDtypeStruct(
        (config.vocab_size, config.embedding_width or config.width), jnp.float32
    )
    one_layer = dataclasses.replace(config, layers=1)  # they are alike: trace one

    def init(module: nn.Module, *arguments: jax.ShapeDtypeStruct) -> dict[str, Any]:
        key = jax.random.key(0)
        return jax.eval_shape(lambda *rest: module.init(key, *rest), *arguments)[
            "params"
        ]

    embeddings = transformer.Embeddings(config)
    encoder = transformer.Encoder(one_layer)
    layer = jax.eval_shape(
        lambda h, m: encoder.init(jax.random.key(0), h, m, True), hidden, mask
    )["params"]["layer_0"]
    tree = {
        "embeddings": jax.eval_shape(
            lambda i: embeddings.init(jax.random.key(0), i, True), ids
        )["params"],
        "encoder": {f"layer_{number}": layer for number in range(config.layers)},
        "pooler": {
            "dense": {
                "kernel": jax.ShapeDtypeStruct((config.width,) * 2, jnp.float32),
                "bias": jax.ShapeDtypeStruct((config.width,), jnp.float32),
            }
        },
        "mlm_head": init(heads.MLMHead(config), hidden, table),
        "rtd_head": init(heads.RTDHead(config), hidden),
    }
    return {
        path: leaf.shape
        for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def part_of(path: str) -> str:
    """Returns the first name of a path: `encoder/layer_0/...` -> `encoder`."""
    return path.partition("/")[0]


def describe(model: Pretrained) -> str:
    """Describes a model in one line for a person."""
    config = model.config
    extra = [part for part in OPTIONAL if part in model.params]
    millions = sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6
    return (
        f"{model.family}, {config.layers} layers of width {config.width},"
        f" {config.heads} heads, feed-forward {config.feed_forward},"
        f" {config.vocab_size:,} rows, {config.max_length} positions,"
        f" {', '.join(extra) or 'no heads'}, {millions:.1f} million parameters"
    )


def first_layers(model: Pretrained, layers: int) -> Pretrained:
    """Takes a model's embeddings and first layers (section 4.1's hot start), no heads.

    Raises:
      PretrainedError: if there are fewer layers.
    """
    if not 1 <= layers <= model.config.layers:
        raise PretrainedError(
            f"{layers} layers of a model that has {model.config.layers}"
        )
    params = {
        "embeddings": model.params["embeddings"],
        "encoder": {
            name: model.params["encoder"][name]
            for name in (f"layer_{number}" for number in range(layers))
        },
    }
    config = dataclasses.replace(model.config, layers=layers)
    return model._replace(config=config, params=params)


def trim(model: Pretrained, keep_ids: Iterable[int]) -> Pretrained:
    """Keeps only some rows of the vocabulary; outputs on kept pieces are the same.

    Args:
      keep_ids: rows to keep, as `tokenizers.kept_ids` gives them. The i-th smallest
        becomes id i, as in `tokenizers.trim`.

    Raises:
      PretrainedError: if a row is not there, or the padding piece is not kept.
    """
    keep = np.unique(np.fromiter(keep_ids, np.int64))
    size = model.config.vocab_size
    if not keep.size or keep[0] < 0 or keep[-1] >= size:
        raise PretrainedError(f"rows to keep must be in 0...{size - 1}")
    new_ids = {int(old): new for new, old in enumerate(keep)}
    metadata = dict(model.metadata)
    for key in SPECIAL_IDS:
        if metadata.get(key) is not None:
            if metadata[key] not in new_ids:
                raise PretrainedError(
                    f"{key} {metadata[key]} is not among the rows kept"
                )
            metadata[key] = new_ids[metadata[key]]
    flat = traverse_util.flatten_dict(model.params, sep="/")
    for path in ("embeddings/word_embeddings/embedding", "mlm_head/bias"):
        if path in flat:
            flat[path] = np.asarray(flat[path])[keep]
    config = dataclasses.replace(model.config, vocab_size=len(keep))
    params = traverse_util.unflatten_dict(flat, sep="/")
    return model._replace(config=config, params=params, metadata=metadata)


def select_rows(model: Pretrained, rows: np.ndarray) -> Pretrained:
    """Selects rows of the embedding table, in any order; no head follows.

    Args:
      model: without a head that is tied to the table.
      rows: [N] integers, numbers of rows; row `rows[i]` becomes id i.
    """
    embeddings = dict(model.params["embeddings"])
    table = embeddings["word_embeddings"]["embedding"]
    embeddings["word_embeddings"] = {"embedding": table[rows]}
    config = dataclasses.replace(model.config, vocab_size=len(rows))
    params = model.params | {"embeddings": embeddings}
    return model._replace(config=config, params=params)


def with_rows(
    model: Pretrained, embeddings: Mapping[str, Any], rows: np.ndarray
) -> Pretrained:
    """Puts embeddings that were trained with fewer rows back into the whole model.

    Pieces and positions that were not trained keep the rows that they have.

    Args:
      embeddings: parameters of `transformer.Embeddings`, trained; their N rows of
        `word_embeddings` are some of the model's, their rows of `position_embeddings`
        are the model's first.
      rows: [N] integers, the row of the model's table that each of the N is.

    Raises:
      PretrainedError: if the tables are not of this model.
    """
    positions = len(embeddings["position_embeddings"]["embedding"])
    trained = jax.tree.map(np.asarray, dict(embeddings))
    for name, places in (
        ("word_embeddings", np.asarray(rows)),
        ("position_embeddings", np.arange(positions)),
    ):
        table = np.array(model.params["embeddings"][name]["embedding"])
        new = trained[name]["embedding"]
        fits = len(places) == len(new) and table.shape[1:] == new.shape[1:]
        if not fits or (len(places) and places.max() >= len(table)):
            raise PretrainedError(
                f"{name}: the table that was trained is another one's"
            )
        table[places] = new
        trained[name] = {"embedding": table}
    return model._replace(params=model.params | {"embeddings": trained})
