"""What a fine-tuning run trained, put back into the encoder that it began with.

V pieces of the whole model, K of them kept for the run.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import lifecycle, shared_flags
from experiments.xnli import config as xnli_config
from nebula_jax import errors
from nebula_jax.models import param_shapes, pretrained
from nebula_jax.training import checkpoint


class Trained(NamedTuple):
    """The parameters of a run's selected step."""

    params: dict[str, Any]
    """Those that the run trained; of a trained table, the kept rows."""
    keep: np.ndarray
    """[K] int32, which of the V pieces were kept, ascending."""
    step: int
    """The selected one."""

    def with_rows(self, model: pretrained.Pretrained) -> pretrained.Pretrained:
        """The whole model, its table with the rows that the run trained, if it did.

        Pieces that the run never saw have the rows that they had.

        Raises:
          CheckpointError: if the table is another model's.
        """
        if "embeddings" not in self.params:
            return model
        embeddings = dict(model.params["embeddings"])
        table = np.array(embeddings["word_embeddings"]["embedding"])
        rows = np.asarray(self.params["embeddings"]["word_embeddings"]["embedding"])
        if len(rows) != len(self.keep) or self.keep[-1] >= len(table):
            raise checkpoint.CheckpointError("the run's table is not of this encoder")
        table[self.keep] = rows
        embeddings["word_embeddings"] = {"embedding": table}
        return model._replace(params=model.params | {"embeddings": embeddings})

    def encoder(self, model: pretrained.Pretrained) -> pretrained.Pretrained:
        """The whole model with what the run trained of it, and no classifier.

        The classifier's dense layer is the pooler's, if it is what the model had and
        the first position is what was classified.

        Args:
          model: as the run began with it.
        """
        trained = jax.device_get(self.params)
        whole = self.with_rows(model).params
        params = {"encoder": trained["encoder"], "embeddings": whole["embeddings"]}
        if "embeddings" in trained:
            table = {"word_embeddings": whole["embeddings"]["word_embeddings"]}
            params["embeddings"] = trained["embeddings"] | table
        if "pooler" in whole:
            is_pooler = xnli_config.POOLING.value == "cls"
            dense = trained["classifier"]["dense"]
            params["pooler"] = {"dense": dense} if is_pooler else whole["pooler"]
        return model._replace(params=params)

    def filled(self, params: dict[str, Any]) -> dict[str, Any]:
        """A classifier's parameters with what was trained in its place.

        Args:
          params: a new classifier's, on a model from `with_rows` (trimmed or not).

        Raises:
          NebulaError: if shapes differ.
        """
        trained = dict(self.params)
        if "embeddings" in trained:
            table = params["embeddings"]["word_embeddings"]
            trained["embeddings"] = trained["embeddings"] | {"word_embeddings": table}
        found = params | trained
        param_shapes.check(found, params, "checkpoint", "the run's configuration")
        return found


def read(folder: pathlib.Path) -> Trained:
    """What the run of a folder, whose flags hold, trained.

    Raises:
      CheckpointError: if its encoder is not --encoder as it is now.
      NebulaError: if there is no checkpoint, or no step of it is selected.
    """
    _check_encoder(folder)
    checkpoints = folder / xnli_config.NAME / "checkpoints"
    steps = checkpoint.verified_steps(checkpoints, lifecycle.say)
    if not steps:
        raise errors.NebulaError(f"{checkpoints}: no checkpoint is there")
    whole = checkpoint.read(checkpoints, steps[-1])
    step = int(whole["selected_step"])
    if step == 0:
        raise errors.NebulaError(
            f"{folder} has not looked at English dev yet, so no step of it is selected;"
            " its own command goes on"
        )
    if steps[-1] < shared_flags.STEPS.value:
        lifecycle.say(
            f"{folder} stands at step {steps[-1]:,} of {shared_flags.STEPS.value:,}"
        )
    return Trained(whole["best"], np.asarray(whole["keep"]), step)


def _check_encoder(folder: pathlib.Path) -> None:
    about = checkpoint.newest_about(folder / xnli_config.NAME / "checkpoints")
    before = about.get("own", {})
    for name, digest in xnli_config.own().items():
        if before.get(name, digest) != digest:
            raise checkpoint.CheckpointError(
                f"{folder} was trained with another {name} than that of"
                f" --encoder={xnli_config.ENCODER.value} now"
            )
