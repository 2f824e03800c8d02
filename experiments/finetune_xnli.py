"""Fine-tunes an encoder on English pairs and tests it in 15 languages (Table 1).

    python -m experiments.finetune_xnli \
        --flagfile=experiments/flags/xnli_warm.flags --data_dir=FOLDER

FOLDER has `nli/{train,dev}.en.tsv.gz` and `nli/test.LANG.tsv.gz`. The step that is
tested is chosen on English dev alone (--select). The same command again goes on where
a run was stopped, bit for bit.

    python -m experiments.finetune_xnli --eval_only --run=RUN --data_dir=FOLDER

prints the same table for the pairs of any folder in that format (of TFDS's own files
only with --dataset=tfds:xnli on this very command line).
"""

import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import lifecycle, progress, run_report, saved, shared_flags
from experiments.xnli import config as xnli_config
from experiments.xnli import data as xnli_data
from experiments.xnli import report as xnli_report
from experiments.xnli import restored
from nebula_jax.data import length_buckets, tokenizers
from nebula_jax.models import classifier, pretrained
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import classification, cut
from nebula_jax.training import state as train_state

flags.adopt_module_key_flags(xnli_config)
for _name in (
    *("workdir", "data_dir", "prepared_dir", "pretrained_dir", "steps", "batch_size"),
    *("seed", "devices_per_cluster", "model_parallel", "checkpoint_every", "log_every"),
):
    flags.declare_key_flag(_name)

TABLE = "{} pairs, {} after step {}"  # split, encoder, step


def main() -> int:
    """Trains and tests, or only tests."""
    flags.FLAGS["cluster"].value = xnli_config.NAME
    if xnli_config.EVAL_ONLY.value:
        return evaluate_run()
    xnli_config.check()
    xnli_config.data_dir()
    shared_flags.simulate_devices()
    with lifecycle.alone_in(shared_flags.workdir()):
        return train()


def train() -> int:
    """Trains to the end, tests the selected step, reports; the exit status."""
    begin = time.monotonic()
    text = _read_text()
    part = text.parts["train"][xnli_config.ENGLISH]
    batches = length_buckets.Schedule(
        part.buckets, shared_flags.BATCH_SIZE.value, shared_flags.SEED.value
    )
    if xnli_config.EPOCHS.value:
        steps = round(xnli_config.EPOCHS.value * batches.steps_per_epoch)
        flags.FLAGS["steps"].value = max(1, steps)
    config = _config(text)
    checkpoints = saved.Saved(
        xnli_config.NAME, xnli_config.settings(text.digest), own=xnli_config.own()
    )
    shared_flags.write_run_flags(
        shared_flags.workdir() / "run.flags", {"workdir": str(shared_flags.workdir())}
    )

    mesh = shared_flags.mesh()
    trained, frozen = _parameters(config, text)
    frozen = jax.device_put(
        frozen, mesh_lib.state_sharding(mesh, mesh_lib.ENCODER_RULES, frozen)
    )
    optimizer = xnli_config.optimizer(config.encoder.layers)
    placed = mesh_lib.sharded_init_from_arrays(
        mesh, functools.partial(_new_state, trained, optimizer, text.keep)
    )
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    take = jax.jit(
        functools.partial(classification.step, config, optimizer),
        out_shardings=(placed.sharding["state"], everywhere),
        donate_argnums=0,
    )
    predict = predictor(config, mesh)

    start = max([0, *checkpoints.steps])
    whole, position = checkpoints.restore(start, placed)
    state, best = whole["state"], whole["best"]
    del whole, trained
    position = {"selected_step": 0, "curve": [], "commits": []} | (position or {})
    if shared_flags.commit() not in position["commits"]:
        position["commits"].append(shared_flags.commit())
    record = progress.Progress(xnli_config.NAME, start)

    def look_at_dev(step: int) -> None:
        nonlocal best
        params = cut.merge(state.params, frozen)
        dev = {xnli_config.ENGLISH: text.parts["dev"][xnli_config.ENGLISH]}
        score = xnli_report.judge(dev, probabilities(predict, params, dev, text))
        accuracy = score[xnli_config.ENGLISH].accuracy
        before = [value for _, value in position["curve"]]
        position["curve"].append([step, accuracy])
        warm = xnli_config.WARMUP_SHARE.value * shared_flags.STEPS.value
        if xnli_config.SELECT.value == "average":
            looks = sum(at > warm for at, _ in position["curve"])
            best = train_state.running_mean(best, state.params, max(1, looks))
            position["selected_step"] = step
        elif xnli_config.SELECT.value == "last" or accuracy > max([-1.0, *before]):
            best = jax.tree.map(jnp.copy, state.params)
            position["selected_step"] = step
        record.evaluation(step, {xnli_config.ENGLISH: {"accuracy": accuracy}})
        print(f"{xnli_config.NAME}: English dev {accuracy:.2%}", flush=True)

    def save(step: int) -> None:
        whole = {
            "state": state,
            "best": best,
            "selected_step": jnp.asarray(position["selected_step"], jnp.int32),
            "keep": jnp.asarray(text.keep),
        }
        checkpoints.save(step, whole, position)

    interrupt = lifecycle.Interrupt().install()
    interrupt.is_graceful = True
    step = start
    while step < shared_flags.STEPS.value and not interrupt.requested:
        batch = batches.batch(step)
        step += 1
        capacity = xnli_config.capacities()[batch.bucket]
        input_ids = part.rows.rows(batch.indices, capacity, text.words.special.pad)
        labels = part.labels[batch.indices]
        input_ids, labels = jax.device_put((input_ids, labels), batch_at)
        state, metrics = take(state, frozen, input_ids, labels)
        record.step(step, metrics)
        if xnli_config.is_judged(step):
            look_at_dev(step)
        if checkpoints.is_due(step) and step < shared_flags.STEPS.value:
            save(step)
    # Before the last checkpoint: with that one no step is left to sum up.
    record.finish(step, {"pairs": len(part.rows)})
    if start < step and step not in checkpoints.steps:
        save(step)
    status = lifecycle.exit_status(step, interrupt)
    if status == 0:
        params = cut.merge(best, frozen)
        _finish(text, predict, params, position, begin, is_new=start < step)
        run = restored.Trained(best, text.keep, position["selected_step"])
        _export(run, shared_flags.workdir())
    return status


def _read_text() -> xnli_data.Text:
    languages = xnli_data.languages("test")
    model, words = xnli_config.load_encoder()
    english = [xnli_config.ENGLISH]
    wanted = {"train": english, "dev": english, "test": languages}
    with lifecycle.timed("reading and tokenising the pairs"):
        return xnli_data.read(wanted, model, words)


def _config(text: xnli_data.Text) -> classifier.Config:
    return classifier.config(
        text.model,
        text.words,
        pooling=xnli_config.POOLING.value,
        dropout=xnli_config.HEAD_DROPOUT.value,
    )


def _parameters(config: classifier.Config, text: xnli_data.Text) -> tuple[Any, Any]:
    """All parameters at step 0: trained, frozen."""
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 0)
    params = classifier.init(config, rng, text.model)
    is_frozen = xnli_config.FREEZE.value
    return cut.split(params, classification.is_trained if is_frozen else cut.train_all)


def _new_state(trained: Any, optimizer: Any, keep: np.ndarray) -> dict[str, Any]:
    """What a checkpoint has, at step 0.

    The parameters of the selected step are in it, because a run that goes on must know
    them; and which pieces were kept, because trained rows of the table belong to them.
    """
    rng = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 1)
    return {
        "state": train_state.create(trained, optimizer, rng),
        "best": trained,
        "selected_step": jnp.zeros((), jnp.int32),
        "keep": jnp.asarray(keep),
    }


def predictor(config: classifier.Config, mesh: jax.sharding.Mesh) -> Callable:
    """(parameters, input_ids [B, L]) -> [B, C] probabilities, jitted.

    Raises:
      FlagError: if the devices cannot share --eval_batch_size evenly.
    """
    size, shards = xnli_config.EVAL_BATCH_SIZE.value, mesh.shape["data"]
    if size % shards:
        raise shared_flags.FlagError(
            f"--eval_batch_size={size} cannot be split evenly over {shards} devices"
        )
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    run = jax.jit(
        functools.partial(classification.predict, config), out_shardings=everywhere
    )
    return lambda params, ids: run(params, jax.device_put(ids, batch_at))


def probabilities(
    predict: Callable,
    params: Any,
    parts: Mapping[str, xnli_data.Part],
    text: xnli_data.Text,
) -> dict[str, np.ndarray]:
    """What a classifier says of all pairs: language -> [N, C] float32.

    Args:
      predict: from `predictor`.
      params: all of them.
      parts: language -> pairs.
      text: that they are of.
    """
    found = {}
    for language, part in parts.items():
        size = xnli_config.EVAL_BATCH_SIZE.value
        pending = []
        for batch in length_buckets.evaluation_batches(
            part.buckets, size, part.rows.lengths
        ):
            capacity = xnli_config.capacities()[batch.bucket]
            ids = part.rows.rows(batch.indices, capacity, text.words.special.pad)
            pending.append((batch, predict(params, ids)))
        rows: list[Any] = [None] * len(part.labels)
        for batch, values in pending:
            for index, row in zip(
                batch.indices[: batch.count], np.asarray(values), strict=False
            ):
                rows[index] = row
        found[language] = np.stack(rows)
    return found


def _finish(text, predict, params, position, begin, is_new) -> None:
    """Tests, writes predictions and summary unless nothing was left to do; reports."""
    folder = shared_flags.workdir()
    path = folder / "summary.json"
    if is_new or not path.is_file():
        parts = text.parts["test"]
        with lifecycle.timed(f"testing {len(parts)} languages"):
            found = probabilities(predict, params, parts, text)
        xnli_report.write_predictions(folder / "predictions", "test", parts, found)
        scores = xnli_report.judge(parts, found)
        seconds = time.monotonic() - begin
        if not is_new:  # it was stopped after training
            seconds += run_report.read(shared_flags.cluster_folder(xnli_config.NAME))[
                "seconds"
            ]
        xnli_report.write(path, xnli_report.summary(text, scores, position, seconds))
    summary = json.loads(path.read_text("utf-8"))
    step = summary["selected_step"]
    xnli_report.show(
        summary["test"], TABLE.format("test", xnli_config.ENCODER.value, step)
    )
    print(f"all of it: {path}, {folder / 'predictions'}")


def _export(run: restored.Trained, folder: pathlib.Path) -> None:
    """Leaves the encoder in a run's folder, if --export."""
    if not xnli_config.EXPORT.value:
        return
    folder = folder / xnli_config.NAME / "encoder"
    model, words = xnli_config.load_encoder()
    with checkpoint_folder.replacing(folder) as new:
        pretrained.save(new, run.encoder(model))
        tokenizers.save(new, words)
    print(f"the encoder: {folder}")


def evaluate_run() -> int:
    """Tests what --run trained on --data_dir; the exit status."""
    dataset = xnli_config.DATASET.value
    folder = shared_flags.take_run_flags(xnli_config.RUN.value, "finetune_xnli")
    # Of this command: the run's would hide --data_dir where TFDS's files are prepared.
    flags.FLAGS["dataset"].value = dataset
    xnli_config.check()
    shared_flags.simulate_devices()
    split = xnli_config.SPLIT.value
    languages = xnli_data.languages(split)
    run = restored.read(folder)
    model, words = xnli_config.load_encoder()
    text = xnli_data.read({split: languages}, run.with_rows(model), words)
    config = _config(text)
    params = run.filled(classifier.init(config, jax.random.key(0), text.model))
    mesh = shared_flags.mesh()
    params = jax.device_put(
        params, mesh_lib.state_sharding(mesh, mesh_lib.ENCODER_RULES, params)
    )
    parts = text.parts[split]
    with lifecycle.timed(f"testing {len(parts)} languages"):
        found = probabilities(predictor(config, mesh), params, parts, text)
    out = pathlib.Path(
        xnli_config.PREDICTIONS_DIR.value
        or folder / "evaluated" / f"{split}-{text.digest}"
    )
    xnli_report.write_predictions(out, split, parts, found)
    results = xnli_report.as_json(xnli_report.judge(parts, found))
    xnli_report.write(
        out / "summary.json",
        {
            "command": shared_flags.command(),
            "commit": shared_flags.commit(),
            "pairs_from": text.sources[split],
            "selected_step": run.step,
            split: results,
        },
    )
    xnli_report.show(results, TABLE.format(split, xnli_config.ENCODER.value, run.step))
    print(f"all of it: {out}")
    _export(run, folder)
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
