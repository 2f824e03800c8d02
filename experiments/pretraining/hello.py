"""The Hellos of a pre-training run: what all of its clusters compare."""

from collections.abc import Sequence
from typing import Any

import nebula_jax
from experiments import configuration
from experiments.pretraining import config, hot_start
from nebula_jax.communication.wire import frames
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


def hello(
    local: config.Local, settings: dict[str, Any], checkpoints: Sequence[int]
) -> frames.Hello:
    """Returns this cluster's Hello.

    Args:
      local: of this process.
      settings: what must be equal in all clusters.
      checkpoints: steps that it could go on from.
    """
    version = nebula_jax.__version__
    return frames.Hello(local.cluster, version, settings, tuple(checkpoints))
