"""The predictions of a classifier, and the test of a run that has ended.

N pairs, C classes.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.xnli import config, data, models, report
from nebula_jax.data import length_buckets, nli
from nebula_jax.models import classifier
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report as run_report
from nebula_jax.runtime.records import run_folder


def probabilities(
    predict: models.Predict,
    params: Any,
    parts: Mapping[str, data.Part],
    text: data.Text,
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Returns language -> [N, C] float32, label probabilities of its N pairs."""
    found = {}
    for language, part in parts.items():
        batches = length_buckets.evaluation_batches(
            text.buckets(part), batch_size, part.rows.lengths
        )
        pending = [
            (batch, predict(params, text.input_ids(part, batch))) for batch in batches
        ]
        rows = np.zeros((len(part.labels), len(nli.LABELS)), np.float32)
        for batch, values in pending:
            rows[batch.indices[: batch.count]] = np.asarray(values)[: batch.count]
        found[language] = rows
    return found


def tested_parts(run: config.Run, text: data.Text) -> dict[str, data.Part]:
    """Returns the pairs that are tested: language -> its pairs."""
    of_split = text.parts[run.local.split].items()
    return {name: part for name, part in of_split if name in run.local.languages}


def tested(
    run: config.Run, predict: models.Predict, params: Any, text: data.Text
) -> dict[str, np.ndarray]:
    """Predicts the pairs that are tested, and reports how long that took."""
    parts = tested_parts(run, text)
    with process.timed(f"testing {len(parts)} languages"):
        return probabilities(predict, params, parts, text, run.local.eval_batch_size)


def wanted(run: config.Run) -> dict[str, Sequence[str]]:
    """Returns the pairs that training and test need: split -> languages."""
    split, english, tested = run.local.split, [config.ENGLISH], run.local.languages
    nli.paths(pathlib.Path(run.local.data_dir), split, tested)
    if split == "dev":
        return {"train": english, "dev": [*dict.fromkeys((*english, *tested))]}
    return {"train": english, "dev": english, split: tested}


def evaluate(run: config.Run) -> int:
    """Tests what a run trained, on the pairs of --data_dir; returns the exit status."""
    split = run.local.split
    needed = {split: run.local.languages}
    nli.paths(pathlib.Path(run.local.data_dir), split, run.local.languages)
    trained = models.read_trained(run)
    model, tokenizer = models.load(run)
    text = data.read(run, needed, trained.with_trained_rows(model), tokenizer)
    shape = models.describe(run, text)
    mesh = devices.mesh(run.local.layout(), run.agreed.batch_size)
    fresh = classifier.init(shape, jax.random.key(0), text.model)
    left = trained.as_classifier_params(fresh, models.is_trained(run))
    params, _ = models.place(mesh, left)
    found = tested(run, models.predictor(run, shape, mesh), params, text)

    # Not among the files of the training, which has predictions and a summary too.
    out = run.local.workdir / run_folder.EVALUATED / f"{split}-{text.digest}"
    parts = tested_parts(run, text)
    report.write_predictions(out, split, parts, found)
    results = report.as_json(report.evaluate(parts, found))
    run_report.write(
        out / "summary.json",
        {
            "command": run_report.command(),
            "commit": run_report.commit(),
            "pairs_from": run.local.data_dir,
            "selected_step": trained.step,
            split: results,
        },
    )
    title = report.title(split, run.agreed.encoder, trained.step)
    report.show(report.results_markdown(results, title), results["warnings"])
    process.progress(f"report: {out}")
    models.export(run, trained)
    return 0
