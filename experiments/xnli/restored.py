"""The trained parameters of a run, put back into the encoder that it began with.

V pieces of the whole model, K of them kept for the run.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.xnli import config, models
from nebula_jax import errors, files
from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import trimming
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import checkpoint, checkpoint_files, partition


class Trained(NamedTuple):
    """The parameters of a run's selected step."""

    params: dict[str, Any]
    """Those that the run trained; of a trained table, the kept rows."""
    keep: np.ndarray
    """[K] int32, which of the V pieces were kept, ascending."""
    step: int
    """The selected one."""

    def with_trained_rows(self, model: pretrained.Pretrained) -> pretrained.Pretrained:
        """Returns the model with the embeddings that the run trained, if any.

        Pieces that the run never saw have the rows that they had.

        Raises:
          pretrained.PretrainedError: if the table is another model's.
        """
        if "embeddings" not in self.params:
            return model
        return trimming.with_rows(model, self.params["embeddings"], self.keep)

    def as_encoder(
        self,
        model: pretrained.Pretrained,
        pooling: str,
        is_trained: partition.IsTrained,
    ) -> pretrained.Pretrained:
        """Returns the model with what the run trained of it, and no classifier.

        The classifier's dense layer is the pooler's, if it is what the model had and
        the first position is what was classified.

        Args:
          model: whole, as the run began with it.
          pooling: of the run.
          is_trained: of the run; its frozen layers are the model's.
        """
        trained = jax.device_get(self.params)
        whole = self.with_trained_rows(model).params
        _, frozen = partition.split({"encoder": whole["encoder"]}, is_trained)
        layers = partition.merge({"encoder": trained.get("encoder", {})}, frozen)
        params = layers | {"embeddings": whole["embeddings"]}
        if "pooler" in whole:
            dense = {"dense": trained["classifier"]["dense"]}
            params["pooler"] = dense if pooling == "cls" else whole["pooler"]
        return model._replace(params=params)

    def as_classifier_params(
        self, params: dict[str, Any], is_trained: partition.IsTrained
    ) -> dict[str, Any]:
        """Returns a classifier's parameters with what was trained in its place.

        Args:
          params: a new classifier's, on a model from `with_trained_rows` (trimmed or
            not).
          is_trained: of the run; what it froze stays as it is in `params`.

        Raises:
          checkpoint.CheckpointError: if shapes differ.
        """
        trained = dict(self.params)
        if "embeddings" in trained:
            table = params["embeddings"]["word_embeddings"]
            trained["embeddings"] = trained["embeddings"] | {"word_embeddings": table}
        return checkpoint.put_back(params, trained, is_trained)


def read(run: config.Run) -> Trained:
    """Reads what a run trained.

    Raises:
      checkpoint.CheckpointError: if its encoder is not --encoder as it is now.
      errors.NebulaError: if there is no checkpoint, or no step of it is selected.
    """
    folder, wanted = run.local.workdir, run.agreed.steps
    checkpoints = run_folder.of_cluster(folder, config.NAME) / "checkpoints"
    about = checkpoint_files.newest_about(checkpoints)
    before = about.get("fingerprints", {})
    for name, digest in models.fingerprints(run).items():
        if before.get(name, digest) != digest:
            raise checkpoint.CheckpointError(
                f"{folder} was trained with another {name} than that of"
                f" --encoder={run.agreed.encoder} now"
            )
    steps = checkpoint_files.verified_steps(checkpoints, process.message)
    if not steps:
        raise errors.NebulaError(f"{checkpoints}: no checkpoint is there")
    tree = checkpoint.read(checkpoints, steps[-1])
    step = int(tree["selected_step"])
    if step == 0:
        raise errors.NebulaError(
            f"{folder} has not evaluated English dev yet, so no step of it is"
            " selected; its own command resumes it"
        )
    if steps[-1] < wanted:
        process.message(f"{folder} stands at step {steps[-1]:,} of {wanted:,}")
    return Trained(tree["best"], np.asarray(tree["keep"]), step)


def export(run: config.Run, trained: Trained) -> None:
    """Leaves the encoder in the run's folder, if --export is given."""
    if not run.local.export:
        return
    folder = run_folder.of_cluster(run.local.workdir, config.NAME) / "encoder"
    model, tokenizer = models.load(run)
    with files.replacing(folder, process.message) as new:
        is_trained = models.is_trained(run)
        pretrained.save(new, trained.as_encoder(model, run.agreed.pooling, is_trained))
        tokenizers.save(new, tokenizer)
    process.progress(f"the encoder: {folder}")
