"""The encoder that an M3 run leaves: the discriminator's, as a checkpoint folder."""

from typing import Any

from experiments.m3 import config, models
from experiments.pretraining import export
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import context as context_lib

FOLDER = export.FOLDER
"""Name of the folder in the cluster's."""


def write(
    context: context_lib.Context,
    run: config.Run,
    made: models.Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the discriminator's encoder and its tokenizer into the cluster's folder.

    Args:
      context: of this process; of a cluster's processes the root writes.
      run: of this process.
      made: the run's models.
      vocabulary: of the run.
      params: of the discriminator, on the devices; its heads are left out.
    """
    on_host = ranks.to_root(params)
    if ranks.is_root():
        local, shape = run.local.of_discriminator(), made.config.discriminator
        folder = context.folder / FOLDER
        export.write(folder, run.agreed, local, shape, vocabulary, on_host)
