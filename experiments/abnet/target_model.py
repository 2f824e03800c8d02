"""PLM-T, made ready in the target cluster's folder: trimmed, with an MLM head."""

import dataclasses
import hmac
import json
import pathlib
import shutil
from typing import Any

import jax

from experiments.abnet import config, data, models
from nebula_jax import errors, files
from nebula_jax.data import length_buckets, parallel_side, tokenizers
from nebula_jax.models import mixed_precision, pretrained
from nebula_jax.models.pretrained import trimming
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.training import abnet, optimizers
from nebula_jax.training import state as train_state

HEAD_RATE, HEAD_WARMUP = 1e-3, 30  # our choice: a head of 0.2 million parameters
HEAD_RNG = 2  # a stream of randomness beside those of `models`
MADE_OF = "made_of.json"
"""In PLM-T's folder, a list: digests of model and text; if a head was made, of what."""


def folder(workdir: pathlib.Path) -> pathlib.Path:
    """Returns where `prepare` leaves PLM-T."""
    return run_folder.of_cluster(workdir, "target") / "model"


def prepare(run: config.Run, side_dir: pathlib.Path) -> None:
    """Makes PLM-T ready in the target cluster's folder, unless it is there.

    Its vocabulary is trimmed to the pieces of the training text: logits are made for
    what is left, and it could not learn to predict others. If it has no MLM head, one
    is trained on that text (--mlm_head_steps). With --init_from PLM-T is that run's.
    Raises errors.NebulaError if the model or the text is not there, or a run has begun
    here with another one.
    """
    agreed, local = run.agreed, run.local
    if local.init_from:
        _copy(pathlib.Path(local.init_from), local.workdir)
        return
    source = local.checkpoint(local.target_model)
    train_file = parallel_side.path(side_dir, "train")
    whole = models.load(run, source, local.target_layers)
    has_head = "mlm_head" in whole.model.params
    made_of = [whole.digest, files.digest(train_file)]
    if not has_head:
        made_of += [local.mlm_head_steps, agreed.objective, agreed.seed, agreed.dtype]
        made_of += [agreed.batch_size, *agreed.length_buckets]
    manifest = folder(local.workdir) / MADE_OF
    made_of = json.dumps(made_of) + "\n"
    if manifest.is_file() and manifest.read_text() == made_of:
        return
    fingerprints = {"target_model": _keyed(run, made_of)}
    settings = config.settings(run)
    for cluster in ("target", "whole"):
        checkpoints.check_same_run(local.workdir, cluster, settings, fingerprints)
    texts = parallel_side.read(train_file).texts
    counts = tokenizers.count_pieces(whole.tokenizer, texts)
    model, tokenizer, _ = trimming.trim_to(whole.model, whole.tokenizer, counts)
    for part in ("pooler", "rtd_head"):
        model.params.pop(part, None)
    process.message(
        f"{source}: {tokenizer.size:,} of {whole.tokenizer.size:,} pieces are kept;"
        f" {'it has' if has_head else 'no'} MLM head"
    )
    with files.replacing(manifest.parent, process.message) as new:
        tokenizers.save(new, tokenizer)
        if not has_head:
            with process.timed("training an MLM head on the target text"):
                tokenizer = tokenizers.load(new)
                text = data.read(run, side_dir, tokenizer, is_translated=False)
                head = jax.device_get(train_head(run, model, text))
            model = model._replace(params=model.params | {"mlm_head": head})
        pretrained.save(new, model)
        (new / MADE_OF).write_text(made_of)


def _copy(earlier: pathlib.Path, workdir: pathlib.Path) -> None:
    """Copies PLM-T of an earlier run, whose pieces and head the adapters go with."""
    there = folder(workdir) / MADE_OF
    if not (folder(earlier) / MADE_OF).is_file():
        if there.is_file():  # the run goes on without the earlier one
            return
        raise errors.SettingsError(
            f"--init_from={earlier}: the target's model is not there, at"
            f" {folder(earlier)}"
        )
    if there.is_file():
        if there.read_bytes() != (folder(earlier) / MADE_OF).read_bytes():
            raise errors.SettingsError(
                f"{workdir} has another target model than --init_from={earlier}; name"
                " another workdir"
            )
        return
    with files.writing(folder(workdir)) as new:
        shutil.copytree(folder(earlier), new)


def load(run: config.Run) -> models.Plm:
    """Reads PLM-T as `prepare` left it, whose MLM head trains if it was made here."""
    there = folder(run.local.workdir)
    _, _, *head = json.loads((there / MADE_OF).read_text())
    return models.load(run, there, new_head=bool(head))


def fingerprint(run: config.Run) -> str:
    """Returns a digest of what `prepare` made PLM-T of.

    The source cluster receives it, so it is keyed: the training text is part of it, and
    nobody who has only this is to find out whether some text is the same.
    """
    return _keyed(run, (folder(run.local.workdir) / MADE_OF).read_text())


def _keyed(run: config.Run, made_of: str) -> str:
    key = data.id_key(run)
    return hmac.new(key, made_of.encode(), "sha256").hexdigest()[:12]


def train_head(
    run: config.Run, model: pretrained.Pretrained, text: data.Text
) -> dict[str, Any]:
    """Trains an MLM head for PLM-T, whose encoder is frozen."""
    agreed, steps, rows = run.agreed, run.local.mlm_head_steps, text.train
    encoder_config = dataclasses.replace(model.config, dropout=0.0)
    special = text.tokenizer.special
    optimizer = optimizers.adam(
        optimizers.linear_decay(HEAD_RATE, HEAD_WARMUP, max(1, steps))
    )
    rng = jax.random.fold_in(jax.random.key(agreed.seed), HEAD_RNG)
    head = abnet.init_head(encoder_config, rng)
    state = train_state.create(head, optimizer, rng)
    rows_of_batch = min(agreed.batch_size, len(rows))
    buckets = data.row_buckets(agreed, text)
    order = length_buckets.Schedule(buckets, rows_of_batch, agreed.seed)
    encoder = {part: model.params[part] for part in ("embeddings", "encoder")}
    encoder = jax.device_put(
        mixed_precision.cast_kernels(encoder, encoder_config.operands)
    )
    skips = progress.Skips("the MLM head", run.local.allow_nonfinite)
    first = last = 0.0
    for number in range(steps):
        bucket, indices, _ = order.batch(number)
        columns = agreed.length_buckets[bucket]
        lengths = rows.lengths[indices]
        slots = data.slots(lengths, len(indices), columns, agreed.objective)
        ids = rows.rows(indices, columns, text.tokenizer.special.pad)
        state, metrics = abnet.head_step(
            encoder_config,
            special,
            agreed.objective,
            len(slots),
            optimizer,
            state,
            encoder,
            ids,
        )
        skips.take(number + 1, metrics)
        last = float(metrics["loss"])
        first = first or last
    process.message(f"MLM head: loss {first:.2f} -> {last:.2f}")
    return state.params
