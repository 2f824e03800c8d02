"""The encoder that a BERT run leaves, as a checkpoint folder."""

import pathlib
from typing import Any

from experiments.bert import config, models
from experiments.pretraining import export
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process

FOLDER = export.FOLDER
"""Name of the folder in the cluster's."""


def write(
    folder: pathlib.Path,
    run: config.Run,
    made: models.Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> bool:
    """Writes the encoder and its tokenizer, unless only adapters have trained.

    No checkpoint format has adapters between layers, and the encoder is as it was.

    Args:
      folder: replaced if it is there (`files.replacing`).
      run: of this process.
      made: the run's model.
      vocabulary: of the run.
      params: of the model, on the host, with `embeddings` and `encoder`.

    Returns:
      True if it was written; else a message gives the reason.
    """
    if run.agreed.trains != "all":
        process.message(
            f"--trains={run.agreed.trains}: no encoder is exported, since it has not"
            " trained; the adapters are in the checkpoints"
        )
        return False
    shape = made.config.encoder
    export.write(folder, run.agreed, run.local, shape, vocabulary, params)
    return True
