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

B batch, L length, D width, V vocabulary.
"""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import config_json
from nebula_jax.models import heads
from nebula_jax.models.pretrained import names as state_names
from nebula_jax.models import transformer

PretrainedError = checkpoint_folder.PretrainedError

PARTS = ("embeddings", "encoder", "pooler", "mlm_head", "rtd_head")
OPTIONAL = PARTS[2:]
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
"""Family -> its kind of tokenizer, if config.json says none."""
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")

MOST_SPARE_ROWS = 127
"""Rows of the table beyond the tokenizer's pieces: tables are rounded up to 128s."""


class Pretrained(NamedTuple):
    """A model, in our tree."""

    family: str
    """A key of `state_names.FAMILIES`: the names it has in a checkpoint."""
    config: transformer.Config
    params: dict[str, Any]
    """`embeddings`, `encoder`, and of `mlm_head`, `rtd_head`, `pooler` what is there;
    float32 numpy arrays, as the Flax modules of these names have them."""
    about: dict[str, Any]
    """config.json as it was read; {} for a model that was made here."""


def load(
    folder: pathlib.Path,
    *,
    dropout: float = 0.0,
    dtype: str = "float32",
    max_length: int | None = None,
) -> Pretrained:
    """Reads a checkpoint folder (config.json, model.safetensors).

    Args:
      folder: in Hugging Face's layout; ERNIE-M's state names may be Paddle's.
      dropout: rate for training on.
      dtype: operands of matrix products; parameters are float32 anyway.
      max_length: positions to keep, all if None.

    Returns:
      The model.

    Raises:
      PretrainedError: for a folder that is no checkpoint, a damaged file, an
        architecture that our encoder is not; or naming every tensor that is missing,
        unexpected or not of the shape that config.json says.
    """
    folder = pathlib.Path(folder)
    about = checkpoint_folder.read_config(folder)
    family, config = config_json.read(about, folder / checkpoint_folder.CONFIG)
    tensors = checkpoint_folder.read_tensors(folder)
    names = family  # a model is written with transformers' names, whatever it had
    if family == "ernie_m" and any(
        name.endswith("layers.0.self_attn.q_proj.weight") for name in tensors
    ):
        names = "ernie_m_paddle"
    params = _to_ours(tensors, names, config, folder)
    if max_length is not None:
        if max_length > config.max_length:
            raise PretrainedError(
                f"{folder} has {config.max_length} positions; {max_length} are wanted"
            )
        table = params["embeddings"]["position_embeddings"]["embedding"]
        rows = config.position_offset + max_length
        params["embeddings"]["position_embeddings"] = {"embedding": table[:rows]}
        config = dataclasses.replace(config, max_length=max_length)
    config = dataclasses.replace(config, dropout=dropout, dtype=dtype)
    return Pretrained(family, config, params, about)


def shapes(config: transformer.Config) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter that a model of this config can have."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.width), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    table = jax.ShapeDtypeStruct(
        (config.vocab_size, config.embedding_width or config.width), jnp.float32
    )
    one_layer = dataclasses.replace(config, layers=1)  # they are alike: trace one

    def init(module, *arguments):
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


def _to_ours(
    tensors: dict[str, np.ndarray],
    name: str,
    config: transformer.Config,
    folder: pathlib.Path,
) -> dict[str, Any]:
    family = state_names.FAMILIES[name]
    given = {state_names.normal(key): array for key, array in tensors.items()}
    wanted = {}  # path -> (foreign name, our shape)
    for path, shape in shapes(config).items():
        theirs = state_names.foreign(path, family.rules)
        if theirs is not None:
            wanted[path] = (theirs, shape)
    parts = {"embeddings", "encoder"} | {
        part_of(path) for path, (theirs, _) in wanted.items() if theirs in given
    }
    wanted = {path: own for path, own in wanted.items() if part_of(path) in parts}

    missing, misshapen, quantised = [], [], []
    for path, (theirs, shape) in wanted.items():
        if theirs not in given:
            missing.append(theirs)
            continue
        expected = state_names.foreign_shape(path, shape, family.transposed)
        if given[theirs].shape != expected:
            misshapen.append(
                f"{theirs} is {list(given[theirs].shape)}, expected {list(expected)}"
            )
        elif not jnp.issubdtype(given[theirs].dtype, jnp.floating):
            quantised.append(f"{theirs} is {given[theirs].dtype}")
    unexpected = [
        key
        for key in sorted(given.keys() - {theirs for theirs, _ in wanted.values()})
        if not state_names.IGNORED.fullmatch(key)
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("not as config.json says", misshapen),
            ("no floating-point numbers", quantised),
        )
        if names
    ]
    if problems:
        raise PretrainedError(
            f"{folder} is no {name} checkpoint: {'; '.join(problems)}"
        )
    _check_tied(given, wanted["embeddings/word_embeddings/embedding"][0], folder)
    return traverse_util.unflatten_dict(
        {
            path: state_names.to_ours(path, given[theirs], shape, family.transposed)
            for path, (theirs, shape) in wanted.items()
        },
        sep="/",
    )


def _check_tied(given: dict[str, np.ndarray], table: str, folder: pathlib.Path) -> None:
    for key, array in given.items():
        if state_names.TIED.fullmatch(key) and not np.array_equal(array, given[table]):
            raise PretrainedError(
                f"{folder}: {key} is not the embedding table; our heads are tied to it"
            )


def part_of(path: str) -> str:
    """`encoder/layer_0/...` -> `encoder`."""
    return path.partition("/")[0]


def save(folder: pathlib.Path, model: Pretrained) -> None:
    """Writes a checkpoint folder that `load` and `transformers` read; the same values.

    A discriminator trained here has the names of ELECTRA, a generator those of BERT:

        save(folder, Pretrained("electra", config, params, {}))

    Args:
      folder: made if missing. Its tokenizer is another matter: `tokenizer.save`.
      model: its `params` may be device arrays.

    Raises:
      PretrainedError: if the family has no such part, or counts positions otherwise.
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
    own_heads = [head for head in ("rtd_head", "mlm_head") if head in model.params]
    tensors = {
        name
        if part_of(path).endswith("head") or not own_heads
        else family.prefix + name: state_names.to_foreign(
            path, flat[path], family.transposed
        )
        for path, name in names.items()
    }
    about = config_json.write(
        model.about, model.family, config, own_heads[0] if own_heads else ""
    )
    checkpoint_folder.write(pathlib.Path(folder), about, tensors)


def trim(model: Pretrained, keep_ids: Iterable[int]) -> Pretrained:
    """Keeps only some rows of the vocabulary; outputs on kept pieces are the same.

    Args:
      model: any.
      keep_ids: rows to keep, as `tokenizer.kept_ids` gives them. The i-th smallest
        becomes id i, as in `tokenizer.trim`.

    Returns:
      The smaller model.

    Raises:
      PretrainedError: if a row is not there, or the padding piece is not kept.
    """
    keep = np.unique(np.fromiter(keep_ids, np.int64))
    size = model.config.vocab_size
    if not keep.size or keep[0] < 0 or keep[-1] >= size:
        raise PretrainedError(f"rows to keep must be in 0...{size - 1}")
    new_ids = {int(old): new for new, old in enumerate(keep)}
    about = dict(model.about)
    for key in SPECIAL_IDS:
        if about.get(key) is not None:
            if about[key] not in new_ids:
                raise PretrainedError(f"{key} {about[key]} is not among the rows kept")
            about[key] = new_ids[about[key]]
    flat = traverse_util.flatten_dict(model.params, sep="/")
    for path in ("embeddings/word_embeddings/embedding", "mlm_head/bias"):
        if path in flat:
            flat[path] = np.asarray(flat[path])[keep]
    config = dataclasses.replace(model.config, vocab_size=len(keep))
    params = traverse_util.unflatten_dict(flat, sep="/")
    return model._replace(config=config, params=params, about=about)


def first_layers(model: Pretrained, layers: int) -> Pretrained:
    """The model's embeddings and first layers (section 4.1's hot start), no heads."""
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


def check_tokenizer(model: Pretrained, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises PretrainedError if a tokenizer is clearly another model's.

    By the number of its pieces, and by how its special pieces are written: as
    config.json says (tokenizer_class) or as the model's family has them; of BERT's form
    are models with either kind. Nothing in a checkpoint tells two vocabularies of the
    same kind and size apart.
    """
    rows, pieces = model.config.vocab_size, tokenizer.size
    if not pieces <= rows <= pieces + MOST_SPARE_ROWS:
        raise PretrainedError(
            f"a tokenizer of {pieces} pieces is not that of a model of {rows} rows"
        )
    kind = str(model.about.get("tokenizer_class") or KINDS.get(model.family))
    pad = tokenizer.piece(tokenizer.special.pad)
    wanted = [piece for name, piece in PADDING.items() if kind.startswith(name)]
    if wanted and pad not in wanted:
        raise PretrainedError(
            f"a tokenizer that pads with {pad} is not that of a model whose tokenizer"
            f" is {kind}, which pads with {wanted[0]}"
        )


def describe(model: Pretrained) -> str:
    """One line for a person."""
    config = model.config
    extra = [part for part in OPTIONAL if part in model.params]
    millions = sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6
    return (
        f"{model.family}, {config.layers} layers of width {config.width},"
        f" {config.heads} heads, feed-forward {config.feed_forward},"
        f" {config.vocab_size:,} rows, {config.max_length} positions,"
        f" {', '.join(extra) or 'no heads'}, {millions:.1f} million parameters"
    )
