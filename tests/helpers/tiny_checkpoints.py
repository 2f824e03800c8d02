"""Checkpoints of few layers, with random weights and BERT's tokenizer."""

import pathlib
from collections.abc import Iterable

import numpy as np
from flax import traverse_util

from nebula_jax.models import modern, pretrained, transformer
from nebula_jax.models.pretrained import names, tree

LENGTH = 16


def write(
    folder: pathlib.Path,
    words: Iterable[str],
    parts: tuple[str, ...],
    width: int = 16,
    seed: int = 0,
    layers: int = 2,
    family: str = "bert",
) -> pathlib.Path:
    """Writes a model with `parts`, such as "embeddings", and its vocabulary, which is
    `words` and control pieces, into a new folder; returns it. width: D, half the inner
    width of a layer; family: whose layout."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    config = transformer.Config(
        vocab_size=len(pieces),
        layers=layers,
        width=width,
        heads=2,
        feed_forward=2 * width,
        max_length=LENGTH,
        token_types={"bert": 2, "ernie_m": 0, "modernbert": 0}.get(family, 1),
        body=modern.Body() if family == "modernbert" else None,
        position_offset=names.FAMILIES[family].position_offset,
    )
    random = np.random.RandomState(seed)
    flat = {
        path: np.float32(path.endswith("scale") + 0.3 * random.randn(*shape))
        for path, shape in tree.shapes(config).items()
        if path.startswith(parts)
    }
    params = traverse_util.unflatten_dict(flat, sep="/")
    about = {"tokenizer_class": "BertTokenizer"}  # whatever the family
    pretrained.save(folder, pretrained.Pretrained(family, config, params, about))
    return folder
