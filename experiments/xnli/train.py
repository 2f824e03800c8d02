"""Fine-tuning on English pairs, and the test in all languages at its end."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import configuration
from experiments.xnli import config, data, evaluate, models, report
from nebula_jax.communication import ranks
from nebula_jax.data import length_buckets
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import page, run_folder
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import partition


class Selection(NamedTuple):
    """The parameters that are selected so far, and the evaluations behind that."""

    step: int  # the selected step; 0 before any
    params: Any
    curve: tuple[tuple[int, float], ...] = ()  # (step, English dev accuracy) of each

    @property
    def position(self) -> dict[str, Any]:
        """A selection without its parameters, as JSON values of a checkpoint."""
        return {"selected_step": self.step, "curve": list(map(list, self.curve))}

    def after(self, rule: str, step: int, accuracy: float, params: Any) -> "Selection":
        """Returns the selection by --checkpoint_selection after one more evaluation."""
        curve = (*self.curve, (step, accuracy))
        if rule == "last" or all(accuracy > earlier for _, earlier in self.curve):
            # A copy, because the next step uses the parameters up.
            return Selection(step, jax.tree.map(jnp.copy, params), curve)
        return self._replace(curve=curve)


def restored_selection(params: Any, position: Mapping[str, Any] | None) -> Selection:
    """Returns the selection of a checkpoint; before any evaluation without one.

    `params` are its `best`; at the beginning, without a position, any of that shape.
    """
    if position is None:
        return Selection(0, params)
    curve = tuple((step, accuracy) for step, accuracy in position["curve"])
    return Selection(position["selected_step"], params, curve)


def train(run: config.Run) -> int:
    """Trains to the end, tests the selected step, reports; returns the exit status."""
    begin = time.monotonic()
    text, batches = _read_text(run)
    if run.local.epochs:
        steps = round(run.local.epochs * batches.steps_per_epoch)
        run = run.with_agreed(steps=max(1, steps))
    context = run.context(cluster=config.NAME)
    pairs, agreed = text.parts["train"][config.ENGLISH], run.agreed
    settings = config.settings(agreed, text.digest)
    saved = context.open_checkpoints(settings, models.fingerprints(run))
    if ranks.is_root():
        configuration.write_run_flags(run.local.workdir, run)

    mesh = devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)
    shape = models.describe(run, text)
    train_step, fresh, frozen = models.trained(run, mesh, shape, text)
    predict = models.predictor(run, shape, mesh)
    tree, position = saved.restore(saved.newest, fresh)
    state, selection = tree["state"], restored_selection(tree["best"], position)
    before = position["commits"] if position else []
    commits = list(dict.fromkeys([*before, run_report.commit()]))
    del tree  # the first step uses up what the state was made of
    context.begin(saved.newest)

    def to_save() -> dict[str, Any]:
        return models.to_save(state, selection.params, selection.step, text)

    def position_now() -> dict[str, Any]:
        return selection.position | {"commits": commits}

    for step in context.each(context.alone()):
        with context.trace.span("next batch"):
            # A batch is a function of seed and step: resuming needs no position of it.
            rows = _rows(text, pairs, batches.batch(step - 1), mesh, agreed.batch_size)
        state, metrics = context.compute(step, train_step, state, frozen, *rows)
        context.record.step(step, metrics)
        if agreed.is_evaluated(step):
            params = partition.merge(state.params, frozen)
            accuracy = _dev_accuracy(run, context, step, predict, params, text)
            rule = agreed.checkpoint_selection
            selection = selection.after(rule, step, accuracy, state.params)
        if step < agreed.steps:
            saved.after(step, to_save(), position_now)
    # Before the last checkpoint: with that one no step is left to sum up.
    context.finish({"pairs": len(pairs.rows)})
    saved.at_end(context.step, to_save(), position_now)
    if (status := context.exit_status()) == 0:
        _test(run, predict, selection, frozen, text, position_now(), begin)
    return status


def _read_text(run: config.Run) -> tuple[data.Text, length_buckets.Schedule]:
    """Reads all pairs, and orders those to train on."""
    model, tokenizer = models.load(run)
    with process.timed("reading and tokenizing the pairs"):
        text = data.read(run, evaluate.wanted(run), model, tokenizer)
    buckets = text.buckets(text.parts["train"][config.ENGLISH])
    agreed = run.agreed
    return text, length_buckets.Schedule(buckets, agreed.batch_size, agreed.seed)


def _rows(
    text: data.Text,
    pairs: data.Part,
    batch: length_buckets.Batch,
    mesh: jax.sharding.Mesh,
    batch_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns ids and labels of a batch, on the devices."""
    rows_here = mesh_lib.rows_here(mesh, batch_size)
    batch = batch._replace(indices=batch.indices[rows_here])
    rows = (text.input_ids(pairs, batch), pairs.labels[batch.indices])
    return mesh_lib.put_rows(mesh, rows, batch_size)


def _dev_accuracy(
    run: config.Run,
    context: context_lib.Context,
    step: int,
    predict: models.Predict,
    params: Any,
    text: data.Text,
) -> float:
    """Returns the accuracy on English dev after `step`, and records it."""
    dev = {config.ENGLISH: text.parts["dev"][config.ENGLISH]}
    size = run.local.eval_batch_size
    with context.evaluating():
        found = evaluate.probabilities(predict, params, dev, text, size)
        accuracy = report.evaluate(dev, found)[config.ENGLISH].accuracy
    context.record.evaluation(step, {config.ENGLISH: {"accuracy": accuracy}})
    if ranks.is_root():
        process.progress(f"{config.NAME}: English dev {accuracy:.2%}")
    return accuracy


def _test(
    run: config.Run,
    predict: models.Predict,
    selection: Selection,
    frozen: Any,
    text: data.Text,
    position: Mapping[str, Any],
    begin: float,
) -> None:
    """Tests the selected parameters unless that is done; exports and reports."""
    folder = run.local.workdir
    path, cluster = folder / "summary.json", run_folder.of_cluster(folder, config.NAME)
    if ranks.agree(run_report.is_stale(path, [cluster])):
        params = partition.merge(selection.params, frozen)
        found = evaluate.tested(run, predict, params, text)
        if ranks.is_root():
            parts, split = evaluate.tested_parts(run, text), run.local.split
            report.write_predictions(folder / "predictions", split, parts, found)
            scores, command = report.evaluate(parts, found), time.monotonic() - begin
            summary = report.summary(run, text, scores, position, cluster, command)
            run_report.write(path, summary)
            report.write_page(folder, cluster)
    params = ranks.to_root(selection.params)
    if ranks.is_root():
        models.export(run, models.Trained(params, text.keep, selection.step))
        summary = run_report.read_summary(folder)
        report.show(report.markdown(summary), summary["test"]["warnings"])
        predictions = folder / "predictions"
        process.progress(f"report: {path}, {folder / page.NAME}, {predictions}")
