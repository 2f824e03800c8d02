"""The encoder that an XNLI run begins with, the classifier on it, and what is trained.

B batch, L length, C classes, V rows of the table, K of them kept for the run.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.xnli import config, data
from nebula_jax import errors, files
from nebula_jax.data import nli, tokenizers
from nebula_jax.models import classifier, pretrained
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import trimming
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import (
    checkpoint,
    checkpoint_files,
    classification,
    partition,
)
from nebula_jax.training import state as train_state

LABELS: dict[str, Any] = {
    "problem_type": "single_label_classification",
    "num_labels": len(nli.LABELS),
    "id2label": {str(number): label for number, label in enumerate(nli.LABELS)},
    "label2id": {label: number for number, label in enumerate(nli.LABELS)},
}
"""Keys of config.json by which transformers names the classes."""
Predict = Callable[[Any, Any], jax.Array]  # (params, [B, L]) -> [B, C] probabilities


def load(run: config.Run) -> tuple[pretrained.Pretrained, tokenizers.Tokenizer]:
    """Returns --encoder and its tokenizer.

    Raises errors.NebulaError if it is no checkpoint, its tokenizer is another model's,
    or it has fewer positions than the longest row.
    """
    agreed = run.agreed
    model, tokenizer = pretrained.load_with_tokenizer(
        run.local.checkpoint(agreed.encoder),
        agreed.length_buckets[-1],
        dropout=agreed.encoder_dropout,
        dtype=agreed.dtype,
        remat=run.local.remat,
        pipeline=run.local.pipeline,
        log=process.message,
    )
    if agreed.encoder_layers:
        model = trimming.first_layers(model, agreed.encoder_layers)
    return model, tokenizer


def fingerprints(run: config.Run) -> dict[str, str]:
    """Returns digests of what a run is resumed and tested with only if unchanged."""
    folder = run.local.checkpoint(run.agreed.encoder)
    return {
        "encoder": checkpoint_folder.digest(folder),
        "tokenizer": tokenizers.load(folder).digest,
    }


def describe(run: config.Run, text: data.Text) -> classifier.Config:
    """Returns the classifier's configuration."""
    return classifier.config(
        text.model,
        text.tokenizer,
        pooling=run.agreed.pooling,
        dropout=run.agreed.classifier_dropout,
    )


def is_trained(run: config.Run) -> partition.IsTrained:
    """Returns which parameters a run trains."""
    if run.agreed.freeze_embeddings:
        return classification.is_trained
    return partition.train_all


def place(mesh: Mesh, params: Any) -> tuple[Any, Any]:
    """Returns parameters on the mesh's devices, and their NamedShardings."""
    sharding = rules.shardings(mesh, rules.RULES, params)
    return mesh_lib.put(params, sharding), sharding


def to_save(state: Any, best: Any, selected: int, text: data.Text) -> dict[str, Any]:
    """Returns what a checkpoint has."""
    return {
        "state": state,
        "best": best,  # parameters of the selected step, which a resumed run needs
        "selected_step": jnp.asarray(selected, jnp.int32),
        "keep": jnp.asarray(text.keep),  # pieces to which trained table rows belong
    }


def trained(
    run: config.Run, mesh: Mesh, shape: classifier.Config, text: data.Text
) -> tuple[Callable[..., Any], mesh_lib.ShardedInit, Any]:
    """Compiles the training step, and plans what it begins with.

    Returns (state, frozen, ids, labels) -> (next state, metrics); what a checkpoint
    has, at step 0; the frozen parameters on the devices.
    """
    optimizer = config.optimizer(run.agreed, shape.encoder.layers)
    of_params, of_steps = (
        jax.random.fold_in(jax.random.key(run.agreed.seed), number) for number in (0, 1)
    )
    params = classifier.init(shape, of_params, text.model)
    to_train, frozen = partition.split(params, is_trained(run))
    frozen, frozen_at = place(mesh, frozen)

    def first() -> dict[str, Any]:
        state = train_state.create(to_train, optimizer, of_steps)
        return to_save(state, to_train, 0, text)

    fresh = mesh_lib.sharded_init_from_arrays(mesh, first)
    step = functools.partial(
        classification.step, shape, optimizer, run.agreed.micro_batches
    )
    inputs = (frozen_at, rules.BATCH, rules.BATCH)
    shapes = fresh.shapes["state"]
    train_step = mesh_lib.jit_step(step, mesh, rules.RULES, shapes, inputs=inputs)
    return train_step, fresh, frozen


def predictor(run: config.Run, shape: classifier.Config, mesh: Mesh) -> Predict:
    """Returns the compiled classifier.

    Raises errors.SettingsError if the devices cannot share --eval_batch_size evenly.
    """
    size, shards = run.local.eval_batch_size, mesh_lib.replicas(mesh)
    if size % shards:
        raise errors.SettingsError(
            f"--eval_batch_size={size} cannot be split evenly over {shards} devices"
        )
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    predict = jax.jit(
        functools.partial(classification.predict, shape), out_shardings=everywhere
    )
    return lambda params, ids: predict(params, mesh_lib.put(ids, batch_at))


class Trained(NamedTuple):
    """The parameters of a run's selected step."""

    params: dict[str, Any]  # those that the run trained; of a table, the kept rows
    keep: np.ndarray  # [K] int32, which of the V pieces were kept, ascending
    step: int

    def with_trained_rows(self, model: pretrained.Pretrained) -> pretrained.Pretrained:
        """Returns the model with the embeddings that the run trained, if any.

        Pieces that the run never saw have the rows that they had. Raises
        pretrained.PretrainedError if the table is another model's.
        """
        if "embeddings" not in self.params:
            return model
        return trimming.with_rows(model, self.params["embeddings"], self.keep)

    def as_checkpoint(
        self, model: pretrained.Pretrained, pooling: str
    ) -> pretrained.Pretrained:
        """Returns the whole model with what the run trained of it, and its classifier.

        transformers has no classifier that reads the mean of all positions. ELECTRA's
        there has a GELU where ours has BERT's tanh, so an ELECTRA becomes a BERT, which
        it is if its embeddings are as wide as its layers; ModernBERT's has a GELU too.
        Where transformers has none, the model is returned without it.
        """
        trained = jax.device_get(self.params)
        whole = self.with_trained_rows(model).params
        params = {"encoder": trained["encoder"], "embeddings": whole["embeddings"]}
        shape = model.config
        if pooling == "cls" and not shape.embedding_width and shape.body is None:
            family = "bert" if model.family == "electra" else model.family
            params["classifier_head"] = trained["classifier"]
            metadata = model.metadata | LABELS
            return pretrained.Pretrained(family, shape, params, metadata)
        if "pooler" in whole:
            params["pooler"] = whole["pooler"]
        return model._replace(params=params)

    def as_classifier_params(
        self, params: dict[str, Any], is_trained: partition.IsTrained
    ) -> dict[str, Any]:
        """Returns a classifier's parameters with what was trained in its place.

        `params` are a new classifier's, on a model from `with_trained_rows` (trimmed or
        not); what the run froze stays as it is there. Raises checkpoint.CheckpointError
        if shapes differ.
        """
        trained = dict(self.params)
        if "embeddings" in trained:
            table = params["embeddings"]["word_embeddings"]
            trained["embeddings"] = trained["embeddings"] | {"word_embeddings": table}
        return checkpoint.put_back(params, trained, is_trained)


def read_trained(run: config.Run) -> Trained:
    """Reads what a run trained.

    Raises checkpoint.CheckpointError if its encoder is not --encoder as it is now;
    errors.NebulaError if there is no checkpoint, or no step of it is selected.
    """
    folder, wanted = run.local.workdir, run.agreed.steps
    checkpoints = run_folder.of_cluster(folder, config.NAME) / "checkpoints"
    about = checkpoint_files.newest_about(checkpoints)
    before = about.get("fingerprints", {})
    for name, digest in fingerprints(run).items():
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
    """Leaves the model in the run's folder, if --export is given."""
    if not run.local.export:
        return
    folder = run_folder.of_cluster(run.local.workdir, config.NAME) / "encoder"
    model, tokenizer = load(run)
    left = trained.as_checkpoint(model, run.agreed.pooling)
    about = (
        f"It began with {pathlib.Path(run.agreed.encoder).name}, and was fine-tuned for"
        f" {trained.step:,} steps on English pairs, to tell whether the first sentence"
        " entails the second, contradicts it, or neither (XNLI)."
    )
    with files.replacing(folder, process.message) as new:
        pretrained.save(new, left)
        tokenizers.save(new, tokenizer, left.config.max_length)
        pretrained.write_card(new, left, about)
    process.progress(f"the encoder: {folder}")
    if "classifier_head" not in left.params:
        process.message(
            f"{folder} has no classifier: transformers has none that reads the mean of"
            " all positions (--pooling=cls reads the first), and none with tanh on"
            " ModernBERT's layers or on embeddings that are narrower than the layers"
        )
