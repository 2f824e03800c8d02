"""The encoder that an M3 run leaves: the discriminator's, as a checkpoint folder."""

import pathlib
from typing import Any

from experiments.m3 import config, models
from experiments.pretraining import export
from nebula_jax.data.tokenizers import vocabulary as vocabularies

FOLDER = export.FOLDER
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
    shape = made.config.discriminator
    local = run.local.of_discriminator()
    export.write(folder, run.agreed, local, shape, vocabulary, params)
