"""Existing encoders in and out: BERT, mBERT, XLM-R, ERNIE-M, ELECTRA, ModernBERT.

    model = pretrained.load(pathlib.Path("pretrained/e5-small"))
    hidden = transformer.hidden_states(
        model.config, model.params, input_ids, attention_mask
    )

`model_type` in config.json decides: a multilingual MiniLM and e5 are of the family
`bert`, in spite of XLM-R's vocabulary. `tree` has what lies between a checkpoint's
tensors and our parameters (`names` their names, `config_json` the config, `folder` the
files); `trimming` makes smaller models; `packages` finds encoders that registries keep.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

import nebula_jax
from nebula_jax.data import tokenizers
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import config_json, tree
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names as state_names

PretrainedError = checkpoint_folder.PretrainedError

HEADS = ("rtd_head", "mlm_head", "classifier_head")
OPTIONAL = ("pooler", *HEADS)  # parts that a model may have beside the encoder
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

CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags: [nebula-jax]
---
# {title}

{about}

The model is {shape}.

    from transformers import pipeline
    print(pipeline("{task}", "{name}")({text}))

Nebula-JAX {version} wrote this page. It knows no licence: add here under which one the
text that this model was trained on, and the model that it began with, allow its use.
"""
SENTENCE = '"A man sleeps."'
PAIR = f'{{"text": {SENTENCE}, "text_pair": "Somebody is awake."}}'

MOST_SPARE_ROWS = 127  # beyond the tokenizer's pieces: tables are rounded up to 128s


class Pretrained(NamedTuple):
    """A model in our parameter tree."""

    family: str  # a key of `names.FAMILIES`: the names it has in a checkpoint
    config: transformer.Config
    params: dict[str, Any]
    """`embeddings`, `encoder`, and those of `mlm_head`, `rtd_head`, `pooler` that the
    model has; float32 numpy arrays, as the Flax modules of these names have them. One
    to be written may have a `classifier_head` (`classifier.Head`) in place of them."""
    metadata: dict[str, Any]  # config.json as it was read; {} of a model made here


def load(
    folder: pathlib.Path,
    *,
    max_length: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> Pretrained:
    """Reads a checkpoint folder in Hugging Face's layout; parameters are float32.

    ERNIE-M's state names may be Paddle's. Of the positions, `max_length` are kept, all
    if None; `fields` are of the config, such as dropout and dtype; `log` gets a line
    about a fine-tuned model's head, which is not read. Raises PretrainedError for a
    folder that is no checkpoint, a damaged file, another architecture than our
    encoder's, fewer positions; or naming every tensor that is missing, unexpected or of
    another shape than config.json gives.
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
    params = tree.read(tensors, rules, config, folder)
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
        if config.body is None:
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

    Raises PretrainedError as `load`, if the model has fewer positions than
    `min_length`, the tokens of the longest row, or if the tokenizer is clearly another
    model's; TokenizerError if there is no tokenizer, or it cannot be read.
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


def save(folder: pathlib.Path, model: Pretrained) -> None:
    """Writes a checkpoint folder that `load` and `transformers` read, bit for bit.

    A discriminator trained here has the names of ELECTRA, a generator those of BERT,
    one with a `body` those of ModernBERT:

        save(folder, Pretrained("electra", config, params, {}))

    The folder is made if missing (`tokenizers.save` writes the tokenizer); parameters
    may be device arrays. Raises PretrainedError if the family has no such part, or
    counts positions otherwise, or a parameter is not finite.
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
    present_heads = [head for head in HEADS if head in model.params]
    tensors = {
        name
        if tree.part_of(path).endswith("head") or not present_heads
        else family.prefix + name: state_names.to_foreign(
            path, flat[path], family.transposed
        )
        for path, name in names.items()
        if name is not None  # none is left
    }
    metadata = config_json.write(
        model.metadata, model.family, config, present_heads[0] if present_heads else ""
    )
    fused = state_names.fused(tensors)
    checkpoint_folder.write(pathlib.Path(folder), metadata, fused)


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


def write_card(folder: pathlib.Path, model: Pretrained, about: str) -> None:
    """Writes a model's card; `about` is a paragraph, of where the model is from."""
    is_classifier = "classifier_head" in model.params
    card = CARD.format(
        task="text-classification" if is_classifier else "feature-extraction",
        title="A classifier of pairs of sentences" if is_classifier else "An encoder",
        text=PAIR if is_classifier else SENTENCE,
        about=about,
        shape=describe(model),
        name=folder.name,
        version=nebula_jax.__version__,
    )
    (folder / "README.md").write_text(card, "utf-8")
