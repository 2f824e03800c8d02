"""The settings of a pre-training run that its clusters compare when they connect."""

from typing import Any

from experiments import configuration
from experiments.pretraining import config, hot_start
from nebula_jax.data.tokenizers import vocabulary as vocabularies


def settings(
    agreed: config.Agreed, local: config.Local, vocabulary: vocabularies.Vocabulary
) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against.

    Args:
      agreed, local: of the run.
      vocabulary: of the run.
    """
    values = configuration.settings(agreed)
    values["vocabulary"] = vocabulary.digest[:16]
    if local.hot_start:
        # Clusters may have it in different places.
        values["--hot_start"] = hot_start.digest(local)[:16]
    return values
