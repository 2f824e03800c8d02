"""Fine-tuning on English pairs, and the test in all languages at its end."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from experiments import configuration
from experiments.xnli import config, data, evaluate, models, report, restored
from experiments.xnli import selection as selection_lib
from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.data import length_buckets
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.parallel.rules import BATCH, RULES
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster, devices
from nebula_jax.runtime.records import checkpoints, progress, run_folder
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import checkpoint, classification, partition


def train(run: config.Run) -> int:
    """Trains to the end, tests the selected step, reports; returns the exit status."""
    begin = time.monotonic()
    interrupt, trace = process.Interrupt().install(), trace_lib.Trace(run.local.trace)
    work = activity.Work(trace=trace)
    cluster.watch(work, interrupt)
    text = _read_text(run)
    pairs = text.parts["train"][config.ENGLISH]
    batches = length_buckets.Schedule(
        text.buckets(pairs), run.agreed.batch_size, run.agreed.seed
    )
    run = config.with_epochs(run, batches.steps_per_epoch)
    agreed, local = run.agreed, run.local
    try:
        saved = checkpoints.Checkpoints(
            local.workdir,
            config.NAME,
            config.settings(agreed, text.digest),
            agreed.checkpoint_every,
            fingerprints=models.fingerprints(run),
        )
    except checkpoint.CheckpointError as error:
        if local.match_label_shares and "with text=" in str(error):
            raise checkpoint.CheckpointError(
                f"{error}. Dev pairs of all languages, which --match_label_shares"
                " needs, are another text: of a run that has ended, give it with"
                f" --eval_only --run={local.workdir}"
            ) from error
        raise
    if ranks.is_root():
        configuration.write_run_flags(local.workdir, run)

    mesh = devices.mesh(local.layout(), agreed.batch_size, agreed.micro_batches)
    rows_here = mesh_lib.rows_here(mesh, agreed.batch_size)
    shape = models.describe(run, text)
    optimizer = config.optimizer(agreed, shape.encoder.layers)
    trained, frozen = models.split_params(run, shape, text)
    frozen, frozen_at = models.place(mesh, frozen)
    fresh = models.init(run, mesh, optimizer, trained, text)
    train_step = mesh_lib.jit_step(
        functools.partial(classification.step, shape, optimizer, agreed.micro_batches),
        *(mesh, RULES, fresh.shapes["state"]),
        inputs=(frozen_at, BATCH, BATCH),
    )
    predict = models.predictor(run, shape, mesh)

    start = saved.newest
    tree, position = saved.restore(start, fresh)
    state, selection = tree["state"], selection_lib.restored(tree["best"], position)
    commits = _commits(position)
    del tree, trained  # the first step uses up what the state was made of
    keep = jnp.asarray(text.keep)
    record = progress.Progress(
        *(local.workdir, config.NAME, start, agreed.steps, local.log_every),
        work=work,
        allow_nonfinite=local.allow_nonfinite,
    )
    saved.before_save = record.settle

    def to_save() -> dict[str, Any]:
        selected = jnp.asarray(selection.step, jnp.int32)
        best = selection.params
        return {"state": state, "best": best, "selected_step": selected, "keep": keep}

    def position_now() -> dict[str, Any]:
        return selection_lib.as_position(selection) | {"commits": commits}

    interrupt.is_graceful = True
    step = start
    steps = pace.alone(start, agreed.steps, interrupt.requested)
    for step in trace.each("wait", ranks.in_step(steps)):
        with trace.span("next batch"):
            batch = batches.batch(step - 1)
            batch = batch._replace(indices=batch.indices[rows_here])
            rows = (text.input_ids(pairs, batch), pairs.labels[batch.indices])
            rows = mesh_lib.put_rows(mesh, rows, agreed.batch_size)
        with trace.span("compute", step=step):
            state, metrics = trace.ready(train_step(state, frozen, *rows))
        record.step(step, metrics)
        if agreed.is_evaluated(step):
            params = partition.merge(state.params, frozen)
            with work.busy(activity.Activity.EVALUATING):
                accuracy = evaluate.dev_accuracy(run, predict, params, text)
            selection = selection_lib.select(
                agreed, selection, step, accuracy, state.params
            )
            record.evaluation(step, {config.ENGLISH: {"accuracy": accuracy}})
            if ranks.is_root():
                process.progress(f"{config.NAME}: English dev {accuracy:.2%}")
        if step < agreed.steps:
            saved.after(step, to_save(), position_now)
    # Before the last checkpoint: with that one no step is left to sum up.
    record.finish(step, {"pairs": len(pairs.rows)})
    saved.at_end(step, to_save(), position_now)
    status = interrupt.exit_status(config.NAME, step, agreed.steps)
    if status == 0:
        before = run_report.read_summary(local.workdir)
        is_due = start < step or not before
        is_due |= local.match_label_shares and "matched" not in before
        if ranks.agree(is_due):
            params = partition.merge(selection.params, frozen)
            parts = evaluate.tested_parts(run, text)
            found = evaluate.tested(run, predict, params, parts, text)
            if ranks.is_root():
                _write(run, text, found, position_now(), begin, is_new=start < step)
        params = ranks.to_root(selection.params)
        if ranks.is_root():
            left = restored.Trained(params, text.keep, selection.step)
            restored.export(run, left)
            _show(run)
    return status


def _read_text(run: config.Run) -> data.Text:
    model, tokenizer = models.load(run)
    wanted = evaluate.wanted(run)
    with process.timed("reading and tokenizing the pairs"):
        text = data.read(run, wanted, model, tokenizer)
    if run.local.match_label_shares:
        evaluate.training_shares(text)  # an error comes now, not after the training
    return text


def _commits(position: Mapping[str, Any] | None) -> list[str]:
    """Returns the commits that train the run, each once."""
    before = position["commits"] if position else []
    return list(dict.fromkeys([*before, run_report.commit()]))


def _write(
    run: config.Run,
    text: data.Text,
    found: evaluate.Predictions,
    position: Mapping[str, Any],
    begin: float,
    is_new: bool,
) -> None:
    """Writes predictions and summary.

    Args:
      run: that has ended.
      text: its pairs.
      found: predictions of the pairs that are tested.
      position: of the last checkpoint.
      begin: when this command began, of time.monotonic.
      is_new: True if this command trained some step.
    """
    folder, split = run.local.workdir, run.local.split
    parts, predictions = evaluate.tested_parts(run, text), folder / "predictions"
    report.write_predictions(predictions, split, parts, found.plain)
    matched = report.write_matched(predictions, split, parts, found.matched)
    cluster = run_folder.of_cluster(folder, config.NAME)
    seconds = time.monotonic() - begin
    if not is_new:  # it was stopped after training
        seconds += run_report.read_summary(cluster)["seconds"]
    settings = {
        **dataclasses.asdict(run.agreed),
        "epochs": run.local.epochs,
        "split": split,
        "data_dir": run.local.data_dir,
    }
    scores = report.evaluate(parts, found.plain)
    summary = report.summary(text, scores, position, settings, cluster, seconds)
    run_report.write(folder / "summary.json", summary | matched)


def _show(run: config.Run) -> None:
    folder = run.local.workdir
    summary = run_report.read_summary(folder)
    report.show(report.markdown(summary), summary["test"]["warnings"])
    print(f"report: {folder / 'summary.json'}, {folder / 'predictions'}")
