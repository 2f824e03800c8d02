"""The encoder that a pre-training run leaves, as a checkpoint folder.

For `finetune_xnli --encoder=` or for `transformers`. With --hot_start, pieces that were
trimmed away have the rows they came with. (Of a run from scratch, transformers reads
the model; it has no tokenizer for a vocabulary that was trained here.)
"""

import dataclasses
import pathlib
import shutil
from typing import Any

from experiments.pretraining import config, hot_start
from nebula_jax import files
from nebula_jax.communication import ranks
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.runtime.life import process

FOLDER = "encoder"
"""Name of the folder in the cluster's."""


def write(
    folder: pathlib.Path,
    agreed: config.Agreed,
    local: config.Local,
    shape: transformer.Config,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes a trained encoder and its tokenizer; the root of the cluster does.

    Args:
      folder: of the cluster; FOLDER in it is replaced (`files.replacing`).
      shape: of the encoder.
      params: of the model, on the root's host; its heads are left out.
    """
    if not ranks.is_root():
        return
    params = {part: params[part] for part in ("embeddings", "encoder")}
    with files.replacing(folder / FOLDER, process.message) as new:
        if local.hot_start:
            whole = hot_start.read(agreed, local)
            rows = hot_start.rows_of(local, vocabulary, whole)
            pretrained.save(new, _grafted(whole, rows, shape.layers, params))
            tokenizers.save(new, tokenizers.load(hot_start.folder(local)))
        else:
            # Our encoder has ELECTRA's form, when its embeddings are as wide as it is.
            pretrained.save(new, pretrained.Pretrained("electra", shape, params, {}))
            shutil.copyfile(vocabulary.path, new / tokenizers.readers.SPIECE)


def _grafted(
    whole: pretrained.Pretrained, rows: Any, layers: int, params: Any
) -> pretrained.Pretrained:
    """Returns --hot_start, all pieces and positions, with what was trained of it."""
    embeddings = pretrained.with_rows(whole, params["embeddings"], rows).params
    left = {"embeddings": embeddings["embeddings"], "encoder": params["encoder"]}
    if "pooler" in whole.params and layers == whole.config.layers:
        left["pooler"] = whole.params["pooler"]  # not trained, but still its top
    shape = dataclasses.replace(whole.config, layers=layers)
    return whole._replace(config=shape, params=left)
