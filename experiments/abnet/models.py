"""The pretrained models of an ABNet run: brought, trimmed, given head and adapters."""

import dataclasses
import functools
import hmac
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import lifecycle, saved, shared_flags
from experiments.abnet import config as abnet_config
from experiments.abnet import data as abnet_data
from nebula_jax.data import length_buckets, parallel_side, tokenizers
from nebula_jax.data import text_folder as corpora
from nebula_jax.models import abnet, abnet_params, pretrained, transformer
from nebula_jax.models.pretrained import packages
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import cut, mlm_head, optimizers
from nebula_jax.training import state as train_state

HEAD_RATE, HEAD_RISE = 1e-3, 30  # our choice: a head of 0.2 million parameters
MADE_OF = "made_of.json"
"""In PLM-T's folder, a list: digests of model and text; if a head was made, of what."""


class Plm(NamedTuple):
    """A pretrained model with its tokenizer."""

    model: pretrained.Pretrained
    words: tokenizers.Tokenizer
    digest: str
    """Tells this model and its vocabulary from others."""


def folder_of(name: str) -> pathlib.Path:
    """The checkpoint folder that a flag names, brought if need be."""
    folder = pathlib.Path(shared_flags.PRETRAINED_DIR.value)
    return packages.checkpoint_of(name, folder, lifecycle.say)


def load(folder: pathlib.Path, layers: int = 0) -> Plm:
    """Reads a model for a side: as many positions as the longest sentence has tokens.

    Args:
      folder: of the checkpoint and its tokenizer.
      layers: how many to keep, from the first; 0 for all.

    Raises:
      PretrainedError, TokenizerError: if it is no checkpoint with a tokenizer.
    """
    longest = abnet_config.buckets()[-1]
    model = pretrained.load(
        folder, dropout=abnet_config.PLM_DROPOUT.value, dtype=abnet_config.DTYPE.value
    )
    if model.config.max_length < longest:
        raise shared_flags.FlagError(
            f"--buckets ends with {longest}; {folder} has"
            f" {model.config.max_length} positions"
        )
    words = tokenizers.load(folder)
    pretrained.check_tokenizer(model, words)
    files = [corpora.digest(each) for each in sorted(folder.glob("*.safetensors"))]
    if layers:
        model = pretrained.first_layers(model, layers)
    return Plm(model, words, corpora.digest_of([words.digest, *files, layers]))


def load_source() -> Plm:
    """PLM-S with its whole table: it is only looked up, and as large as it likes."""
    folder = folder_of(abnet_config.SOURCE_MODEL.value)
    return load(folder, abnet_config.SOURCE_LAYERS.value)


def load_target() -> Plm:
    """PLM-T as `prepare_target` left it."""
    return load(_target_folder())


def _target_folder() -> pathlib.Path:
    return shared_flags.workdir() / "target" / "model"


def prepare_target(text_folder: pathlib.Path) -> None:
    """Makes PLM-T ready in the target cluster's folder, unless it is there.

    Its vocabulary is trimmed to the pieces of the training text: logits are made for
    what is left, and it could not learn to say others. If it has no MLM head, one is
    trained on that text (--head_steps).

    Raises:
      CheckpointError: if a run has begun here with another model.
    """
    source = folder_of(abnet_config.TARGET_MODEL.value)
    train_file = parallel_side.path(text_folder, "train")
    layers = abnet_config.TARGET_LAYERS.value
    whole = load(source, layers)
    made_of = [whole.digest, corpora.digest(train_file)]
    if "mlm_head" not in whole.model.params:
        made_of += [abnet_config.HEAD_STEPS.value, abnet_config.OBJECTIVE.value]
        made_of += [shared_flags.SEED.value, abnet_config.DTYPE.value]
        made_of += [shared_flags.BATCH_SIZE.value, *abnet_config.buckets()]
    folder = _target_folder()
    manifest, made_of = folder / MADE_OF, json.dumps(made_of) + "\n"
    if manifest.is_file() and manifest.read_text() == made_of:
        return
    agreed = abnet_config.settings(abnet_data.PAIR.value)
    for cluster in ("target", "whole"):
        own = {"target_model": _keyed(made_of)}
        saved.check_same_run(cluster, agreed, own)
    counts = tokenizers.count_pieces(whole.words, parallel_side.read(train_file).texts)
    keep = tokenizers.kept_ids(whole.words, np.flatnonzero(counts))
    words = tokenizers.trim(whole.words, keep)
    model = pretrained.trim(whole.model, keep)
    for part in ("pooler", "rtd_head"):
        model.params.pop(part, None)
    lifecycle.say(
        f"{source}: {words.size:,} of {whole.words.size:,} pieces are kept;"
        f" {'it has' if 'mlm_head' in model.params else 'no'} MLM head"
    )
    shutil.rmtree(folder, ignore_errors=True)
    tokenizers.save(folder, words)
    words = tokenizers.load(folder)
    if "mlm_head" not in model.params:
        with lifecycle.timed("training an MLM head on the target text"):
            text = abnet_data.read(text_folder, words, is_translated=False)
            head = _trained_head(model, text)
        params = model.params | {"mlm_head": jax.device_get(head)}
        model = model._replace(params=params)
    pretrained.save(folder, model)
    manifest.write_text(made_of)


def target_digest() -> str:
    """Tells what `prepare_target` made from anything else it might have made.

    The source cluster is told it, so it is keyed: the training text is part of it, and
    nobody who has only this is to find out whether some text is the same.
    """
    return _keyed((_target_folder() / MADE_OF).read_text())


def _keyed(made_of: str) -> str:
    return hmac.new(abnet_data.id_key(), made_of.encode(), "sha256").hexdigest()[:12]


def _trained_head(model: pretrained.Pretrained, text: abnet_data.Text) -> Any:
    config = dataclasses.replace(model.config, dropout=0.0)
    controls = abnet_config.controls(text.words)
    rows, objective = text.rows["train"], abnet_config.OBJECTIVE.value
    optimizer = optimizers.adam(
        optimizers.linear_decay(
            HEAD_RATE, HEAD_RISE, max(1, abnet_config.HEAD_STEPS.value)
        )
    )
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 2)
    head = mlm_head.init_head(config, rng)
    state = train_state.create(head, optimizer, rng)
    buckets = length_buckets.bucket_of(rows.lengths, abnet_config.buckets())
    batches = length_buckets.Schedule(
        buckets, min(shared_flags.BATCH_SIZE.value, len(rows)), shared_flags.SEED.value
    )
    encoder = {part: model.params[part] for part in ("embeddings", "encoder")}
    encoder = transformer.as_operands(encoder, config)
    encoder = jax.device_put(encoder)
    first = last = 0.0
    for number in range(abnet_config.HEAD_STEPS.value):
        bucket, indices = batches.batch(number)
        capacity = abnet_config.buckets()[bucket]
        slots = abnet_data.slots(
            rows.lengths[indices], len(indices), capacity, objective
        )
        ids = rows.rows(indices, capacity, text.words.special.pad)
        state, loss = mlm_head.step(
            config, controls, objective, len(slots), optimizer, state, encoder, ids
        )
        last = float(loss)
        first = first or last
    lifecycle.say(f"MLM head: loss {first:.2f} -> {last:.2f}")
    return state.params


def is_trained_source(path: str) -> bool:
    """Adapters and the length table, unless --train_all."""
    return abnet_config.TRAIN_ALL.value or abnet_params.is_trained(path)


def is_trained_target() -> Callable[[str], bool]:
    """Of a path: adapters, and the head if `prepare_target` made it; or --train_all."""
    if abnet_config.TRAIN_ALL.value:
        return cut.train_all
    _, _, *head = json.loads((_target_folder() / MADE_OF).read_text())
    return functools.partial(abnet_params.is_trained, mlm_head=bool(head))


def source_params(config: abnet.Config, model: pretrained.Pretrained) -> Any:
    """All of S's parameters at step 0."""
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 0)
    own = jax.jit(functools.partial(abnet_params.init_source, config))(rng)
    return abnet_params.with_pretrained(config, own, model.params)


def target_params(config: abnet.Config, model: pretrained.Pretrained) -> Any:
    """All of T's parameters at step 0."""
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 1)
    own = jax.jit(functools.partial(abnet_params.init_target, config))(rng)
    return abnet_params.with_pretrained(config, own, model.params)


def place_frozen(mesh: Mesh, frozen: Any, config: transformer.Config) -> Any:
    """Frozen parameters on this cluster's devices, as the model's products take them.

    Args:
      mesh: of the cluster.
      frozen: from `cut.split`.
      config: of the pretrained model.
    """
    frozen = transformer.as_operands(frozen, config)
    sharding = mesh_lib.state_sharding(mesh, mesh_lib.ENCODER_RULES, frozen)
    return jax.device_put(frozen, sharding)


def new_state(trained: Any, seed_of: int) -> train_state.TrainState:
    """What is trained, at step 0; moments for nothing else.

    Args:
      trained: from `cut.split`.
      seed_of: which side's randomness: 0 for S, 1 for T.
    """
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 10 + seed_of)
    return train_state.create(trained, abnet_config.optimizer(), rng)


def size(state: train_state.TrainState) -> int:
    """How many parameters are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def with_frozen(state: train_state.TrainState, frozen: Any) -> Any:
    """All parameters of a side."""
    return cut.merge(state.params, frozen)
