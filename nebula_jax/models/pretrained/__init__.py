"""Existing encoders in and out: BERT, mBERT, XLM-R, ERNIE-M, ELECTRA, MiniLM.

    model = pretrained.load(pathlib.Path("pretrained/e5-small"))
    hidden = transformer.Embeddings(model.config).apply(
        {"params": model.params["embeddings"]}, input_ids, True
    )
    hidden = transformer.Encoder(model.config).apply(
        {"params": model.params["encoder"]}, hidden, attention_mask, True
    )

A multilingual MiniLM and e5 are of the family `bert`, in spite of XLM-R's vocabulary:
`model_type` in config.json decides.

N pieces of a tokenizer, V rows of a model's table (its pieces, and perhaps spare rows),
P positions.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models import heads, transformer
from nebula_jax.models.pretrained import config_json
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names as state_names

PretrainedError = checkpoint_folder.PretrainedError

PARTS = ("embeddings", "encoder", "pooler", "mlm_head", "rtd_head")
OPTIONAL = PARTS[2:]
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Keys of config.json that are numbers of rows."""
PADDING = {
    "XLMRoberta": "<pad>",
    **dict.fromkeys(("Bert", "Electra", "ErnieM"), "[PAD]"),
}
"""Kind of tokenizer, as in a config.json -> its padding piece."""
KINDS = {
    "xlm_roberta": "XLMRobertaTokenizer",
    "electra": "ElectraTokenizer",
    **dict.fromkeys(("ernie_m", "ernie_m_paddle"), "ErnieMTokenizer"),
}
"""Family -> its kind of tokenizer, if config.json has none."""

MOST_SPARE_ROWS = 127
"""Rows of the table beyond the tokenizer's pieces: tables are rounded up to 128s."""


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


def load(
    folder: pathlib.Path,
    *,
    max_length: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> Pretrained:
    """Reads a checkpoint folder (config.json, model.safetensors).

    Args:
      folder: in Hugging Face's layout; ERNIE-M's state names may be Paddle's.
      max_length: positions to keep, all if None.
      log: receives a line about a fine-tuned model's head, which is not read.
      fields: of the config, such as dropout and dtype; parameters are float32.

    Raises:
      PretrainedError: for a folder that is no checkpoint, a damaged file, another
        architecture than our encoder's, fewer positions; or naming every tensor that
        is missing, unexpected or of another shape than config.json gives.
    """
    folder = pathlib.Path(folder)
    metadata = checkpoint_folder.read_config(folder)
    family, config = config_json.read(metadata, folder / checkpoint_folder.CONFIG)
    tensors = checkpoint_folder.read_tensors(folder)
    rules = family  # a model is written with transformers' names, whatever it had
    if family == "ernie_m" and any(
        name.endswith("layers.0.self_attn.q_proj.weight") for name in tensors
    ):
        rules = "ernie_m_paddle"
    for head in filter(state_names.HEADS.fullmatch, sorted(tensors)):
        del tensors[head]
        log(f"{folder}: {head}, of a fine-tuned model's head, is left out")
    params = _to_ours(tensors, rules, config, folder)
    if metadata.get("tie_word_embeddings") is False and "mlm_head" in params:
        names = map(state_names.normal, tensors)
        if not any(map(state_names.TIED.fullmatch, names)):
            raise PretrainedError(
                f"{folder}: tie_word_embeddings is false in config.json, and the output"
                " layer is not there; save the model with it, or remove the key if the"
                " head is tied to the embedding table"
            )
    if max_length is not None:
        if max_length > config.max_length:
            raise PretrainedError(
                f"{folder} has {config.max_length} positions; {max_length} are wanted"
            )
        table = params["embeddings"]["position_embeddings"]["embedding"]
        rows = config.position_offset + max_length
        params["embeddings"]["position_embeddings"] = {"embedding": table[:rows]}
        config = dataclasses.replace(config, max_length=max_length)
    config = dataclasses.replace(config, **fields)
    return Pretrained(family, config, params, metadata)


def load_with_tokenizer(
    folder: pathlib.Path,
    min_length: int = 0,
    *,
    log: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> tuple[Pretrained, tokenizers.Tokenizer]:
    """Reads a checkpoint folder and the tokenizer in it, and checks that they fit.

    Args:
      folder: as for `load`.
      min_length: positions that the model must have: tokens of the longest row.
      log, fields: as for `load`.

    Raises:
      PretrainedError: as from `load`; if the model has fewer positions; if the
        tokenizer is clearly another model's.
      TokenizerError: if there is no tokenizer, or it cannot be read.
    """
    model = load(folder, log=log, **fields)
    tokenizer = tokenizers.load(folder)
    check_tokenizer(model, tokenizer)
    if model.config.max_length < min_length:
        raise PretrainedError(
            f"{folder} has {model.config.max_length} positions; rows of {min_length}"
            " tokens need as many"
        )
    return model, tokenizer


def trim_to(
    model: Pretrained, tokenizer: tokenizers.Tokenizer, counts: np.ndarray
) -> tuple[Pretrained, tokenizers.Tokenizer, np.ndarray]:
    """Trims a model and its tokenizer to the pieces of a text.

    Args:
      model: whole, or trimmed before.
      counts: [N] integers, how often each piece occurs (`tokenizers.count_pieces` of
        texts, `ragged_rows.count_pieces` of tokenized rows).

    Returns:
      The smaller model, its tokenizer, and the ids kept, [N'] int32, ascending:
      pieces that occur, and special tokens.
    """
    keep = tokenizers.kept_ids(tokenizer, np.flatnonzero(counts))
    return trim(model, keep), tokenizers.trim(tokenizer, keep), keep.astype(np.int32)


def _to_ours(
    tensors: dict[str, np.ndarray],
    name: str,
    config: transformer.Config,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Renames and reshapes a checkpoint's tensors as our parameters."""
    family = state_names.FAMILIES[name]
    given = {state_names.normal(key): array for key, array in tensors.items()}
    wanted = {}  # path -> (foreign name, our shape)
    for path, shape in shapes(config).items():
        foreign_name = state_names.foreign(path, family.rules)
        if foreign_name is not None:
            wanted[path] = (foreign_name, shape)
    parts = {"embeddings", "encoder"} | {
        part_of(path)
        for path, (foreign_name, _) in wanted.items()
        if foreign_name in given
    }
    wanted = {path: each for path, each in wanted.items() if part_of(path) in parts}

    problems = _problems(given, wanted, family.transposed)
    table = wanted["embeddings/word_embeddings/embedding"][0]
    wrapped = [name for name in given if name.endswith(f".{table}")]
    if table not in given and wrapped:
        raise PretrainedError(
            f"{folder}: all names begin with {wrapped[0].removesuffix(table)!r}, which"
            " a wrapper has put before them; save the model inside"
        )
    if problems:
        raise PretrainedError(
            f"{folder} is no {name} checkpoint: {'; '.join(problems)}"
        )
    _check_tied(given, table, folder)
    return traverse_util.unflatten_dict(
        {
            path: state_names.to_ours(
                path, given[foreign_name], shape, family.transposed
            )
            for path, (foreign_name, shape) in wanted.items()
        },
        sep="/",
    )


def _problems(
    given: dict[str, np.ndarray],
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    transposed: bool,
) -> list[str]:
    """Returns what is wrong with a checkpoint's tensors, in words."""
    missing, misshapen, quantized = [], [], []
    for path, (foreign_name, shape) in wanted.items():
        if foreign_name not in given:
            missing.append(foreign_name)
            continue
        expected = state_names.foreign_shape(path, shape, transposed)
        if given[foreign_name].shape != expected:
            misshapen.append(
                f"{foreign_name} is {list(given[foreign_name].shape)},"
                f" expected {list(expected)}"
            )
        elif not jnp.issubdtype(given[foreign_name].dtype, jnp.floating):
            quantized.append(f"{foreign_name} is {given[foreign_name].dtype}")
    unexpected = [
        key
        for key in sorted(
            given.keys() - {foreign_name for foreign_name, _ in wanted.values()}
        )
        if not state_names.IGNORED.fullmatch(key)
    ]
    return [
        f"{problem}: {checkpoint_folder.first_few(names)}"
        for problem, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("not of the shape in config.json", misshapen),
            ("no floating-point numbers", quantized),
        )
        if names
    ]


def _check_tied(given: dict[str, np.ndarray], table: str, folder: pathlib.Path) -> None:
    for key, array in given.items():
        if state_names.TIED.fullmatch(key) and not np.array_equal(array, given[table]):
            raise PretrainedError(
                f"{folder}: {key} is not the embedding table; our heads are tied to it"
            )


def save(folder: pathlib.Path, model: Pretrained) -> None:
    """Writes a checkpoint folder that `load` and `transformers` read, bit for bit.

    A discriminator trained here has the names of ELECTRA, a generator those of BERT:

        save(folder, Pretrained("electra", config, params, {}))

    Args:
      folder: made if missing; `tokenizers.save` writes the tokenizer.
      model: its `params` may be device arrays.

    Raises:
      PretrainedError: if the family has no such part, or counts positions otherwise, or
        a parameter is not finite.
    """
    family = state_names.FAMILIES[model.family]
    config = model.config
    if config.position_offset != family.position_offset:
        raise PretrainedError(
            f"{model.family} counts positions from {family.position_offset}, this model"
            f" from {config.position_offset}"
        )
    flat = traverse_util.flatten_dict(model.params, sep="/")
    if family.token_types and not config.token_types:
        # BERT always adds the embedding of type 0: nothing, here.
        width = config.embedding_width or config.width
        flat["embeddings/token_type_embeddings/embedding"] = np.zeros((1, width))
    names = {path: state_names.foreign(path, family.rules) for path in flat}
    nameless = sorted({path for path, name in names.items() if name is None})
    if nameless:
        raise PretrainedError(
            f"{model.family} has no name for {', '.join(nameless)}; leave it out"
        )
    for path, leaf in flat.items():
        if not np.all(np.isfinite(leaf)):
            raise PretrainedError(f"{path} is not finite: no model is written")
    present_heads = [head for head in ("rtd_head", "mlm_head") if head in model.params]
    tensors = {
        name
        if part_of(path).endswith("head") or not present_heads
        else family.prefix + name: state_names.to_foreign(
            path, flat[path], family.transposed
        )
        for path, name in names.items()
        if name is not None  # none is left
    }
    metadata = config_json.write(
        model.metadata, model.family, config, present_heads[0] if present_heads else ""
    )
    checkpoint_folder.write(pathlib.Path(folder), metadata, tensors)


def check_tokenizer(model: Pretrained, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises PretrainedError if a tokenizer is clearly another model's.

    The number of its pieces is compared, and the form of its special pieces with that
    of `tokenizer_class` in config.json or of the model's family (BERT's has models with
    either form). Nothing in a checkpoint distinguishes two vocabularies of the same
    kind and size.
    """
    rows, pieces = model.config.vocab_size, tokenizer.size
    if not pieces <= rows <= pieces + MOST_SPARE_ROWS:
        raise PretrainedError(
            f"a tokenizer of {pieces} pieces is not that of a model of {rows} rows"
        )
    kind = str(model.metadata.get("tokenizer_class") or KINDS.get(model.family))
    pad = tokenizer.piece(tokenizer.special.pad)
    wanted = [piece for name, piece in PADDING.items() if kind.startswith(name)]
    if wanted and pad not in wanted:
        raise PretrainedError(
            f"a tokenizer that pads with {pad} is not that of a model whose tokenizer"
            f" is {kind}, which pads with {wanted[0]}"
        )


def shapes(config: transformer.Config) -> dict[str, tuple[int, ...]]:
    """Maps the path of every parameter that a config's model can have to its shape."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.width), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    table = jax.ShapeDtypeStruct(
        (config.vocab_size, config.embedding_width or config.width), jnp.float32
    )
    one_layer = dataclasses.replace(config, layers=1)  # they are alike: trace one

    def init(module: nn.Module, *arguments: Any, **fixed: bool) -> dict[str, Any]:
        make = functools.partial(module.init, jax.random.key(0), **fixed)
        return jax.eval_shape(make, *arguments)["params"]

    encoder = transformer.Encoder(one_layer)
    layer = init(encoder, hidden, mask, deterministic=True)["layer_0"]
    square = jax.ShapeDtypeStruct((config.width,) * 2, jnp.float32)
    row = jax.ShapeDtypeStruct((config.width,), jnp.float32)
    tree = {
        "embeddings": init(transformer.Embeddings(config), ids, deterministic=True),
        "encoder": {f"layer_{number}": layer for number in range(config.layers)},
        "pooler": {"dense": {"kernel": square, "bias": row}},
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
