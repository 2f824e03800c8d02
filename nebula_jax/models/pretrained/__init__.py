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

N pieces of a tokenizer, V rows of a model's table.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import config_json
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names as state_names
from nebula_jax.models.pretrained.model import OPTIONAL as OPTIONAL
from nebula_jax.models.pretrained.model import PARTS as PARTS
from nebula_jax.models.pretrained.model import Pretrained as Pretrained
from nebula_jax.models.pretrained.model import describe as describe
from nebula_jax.models.pretrained.model import first_layers as first_layers
from nebula_jax.models.pretrained.model import part_of as part_of
from nebula_jax.models.pretrained.model import select_rows as select_rows
from nebula_jax.models.pretrained.model import shapes as shapes
from nebula_jax.models.pretrained.model import trim as trim
from nebula_jax.models.pretrained.model import with_rows as with_rows

PretrainedError = checkpoint_folder.PretrainedError

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
