"""The encoder that an XNLI run begins with, and the classifier on it.

B batch, L length, C classes, V rows of the table.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.xnli import config, data
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.models import classifier, pretrained
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import packages, trimming
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.runtime.life import process
from nebula_jax.training import classification, partition
from nebula_jax.training import state as train_state

Predict = Callable[[Any, Any], jax.Array]
"""(parameters, input_ids [B, L]) -> [B, C] probabilities."""


def encoder_folder(run: config.Run) -> pathlib.Path:
    """Returns the checkpoint folder of --encoder, fetched if need be.

    Raises:
      errors.NebulaError: if it cannot be had.
    """
    name, prepared = run.agreed.encoder, run.local.pretrained_dir
    return packages.resolve_checkpoint(name, prepared, process.message)


def load(run: config.Run) -> tuple[pretrained.Pretrained, tokenizers.Tokenizer]:
    """Returns --encoder and its tokenizer.

    Raises:
      errors.NebulaError: if it is no checkpoint, its tokenizer is another model's, or
        it has fewer positions than the longest row.
    """
    agreed = run.agreed
    model, tokenizer = pretrained.load_with_tokenizer(
        encoder_folder(run),
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
    folder = encoder_folder(run)
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
    """Returns what a checkpoint has.

    The parameters of the selected step, which a resumed run needs; and which pieces
    were kept, because trained rows of the table belong to them.
    """
    return {
        "state": state,
        "best": best,
        "selected_step": jnp.asarray(selected, jnp.int32),
        "keep": jnp.asarray(text.keep),
    }


def trained(
    run: config.Run, mesh: Mesh, shape: classifier.Config, text: data.Text
) -> tuple[Callable[..., Any], mesh_lib.ShardedInit, Any]:
    """Compiles the training step, and plans what it begins with.

    Args:
      shape: of the classifier.
      text: with the kept pieces.

    Returns:
      (state, frozen, ids, labels) -> (next state, metrics); what a checkpoint has, at
      step 0; the frozen parameters on the devices.
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

    Raises:
      errors.SettingsError: if the devices cannot share --eval_batch_size evenly.
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
