"""The encoder that an M3 run leaves, as a checkpoint folder.

For `finetune_xnli --encoder=` or for `transformers`. With --hot_start, pieces that were
trimmed away have the rows they came with. (Of a run from scratch, transformers reads
the model; it has no tokenizer for a vocabulary that was trained here.)
"""

import dataclasses
import pathlib
import shutil
from typing import Any

from experiments.m3 import config, models
from nebula_jax import files
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained
from nebula_jax.runtime import process

FOLDER = "encoder"
"""Name of the folder in the cluster's."""


def write(
    folder: pathlib.Path,
    run: config.Run,
    made: models.Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the discriminator's encoder and its tokenizer.

    Args:
      folder: replaced if it is there (`files.replacing`).
      run: of this process.
      made: the run's models.
      vocabulary: of the run.
      params: of the discriminator, on the host; its heads are left out.
    """
    params = {part: params[part] for part in ("embeddings", "encoder")}
    with files.replacing(folder, process.message) as new:
        if run.local.hot_start:
            pretrained.save(new, _grafted(run, vocabulary, params))
            whole = tokenizers.load(config.hot_start_folder(run.local))
            tokenizers.save(new, whole)
        else:
            # Our encoder has ELECTRA's form, when its embeddings are as wide as it is.
            shape = made.config.discriminator
            pretrained.save(new, pretrained.Pretrained("electra", shape, params, {}))
            shutil.copyfile(vocabulary.path, new / tokenizers.readers.SPIECE)


def _grafted(
    run: config.Run,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> pretrained.Pretrained:
    """Returns --hot_start, all pieces and positions, with what was trained of it."""
    whole = models.whole_encoder(run)
    kept_layers = models.layers(run.agreed, whole.config)[1]
    rows = models.rows_of(run.local, vocabulary, whole)
    embeddings = pretrained.with_rows(whole, params["embeddings"], rows).params
    left = {"embeddings": embeddings["embeddings"], "encoder": params["encoder"]}
    if "pooler" in whole.params and kept_layers == whole.config.layers:
        left["pooler"] = whole.params["pooler"]  # not trained, but still its top
    shape = dataclasses.replace(whole.config, layers=kept_layers)
    return whole._replace(config=shape, params=left)
