"""The predictions of a classifier, and the test of a run that has ended.

N pairs, C classes.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.xnli import config, data, models, report, restored
from nebula_jax import errors
from nebula_jax.data import length_buckets, nli
from nebula_jax.models import classifier
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report as run_report

EVALUATED = "evaluated"
"""A folder in a run's own, of the predictions of later tests."""


def probabilities(
    predict: models.Predict,
    params: Any,
    parts: Mapping[str, data.Part],
    text: data.Text,
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Predicts the labels of all pairs.

    Args:
      predict: from `models.predictor`.
      params: all of them.
      parts: language -> its N pairs.
      text: that they are of.
      batch_size: pairs at once.

    Returns:
      language -> [N, C] float32, probabilities.
    """
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


def dev_accuracy(
    run: config.Run, predict: models.Predict, params: Any, text: data.Text
) -> float:
    """Returns the accuracy on English dev."""
    dev = {config.ENGLISH: text.parts["dev"][config.ENGLISH]}
    found = probabilities(predict, params, dev, text, run.local.eval_batch_size)
    return report.evaluate(dev, found)[config.ENGLISH].accuracy


def tested_parts(run: config.Run, text: data.Text) -> dict[str, data.Part]:
    """Returns the pairs that are tested: language -> its pairs."""
    of_split = text.parts[run.local.split].items()
    return {name: part for name, part in of_split if name in run.local.languages}


def wanted(run: config.Run) -> dict[str, list[str]]:
    """Returns the pairs that training and test need: split -> languages."""
    split, english = run.local.split, [config.ENGLISH]
    tested = data.languages(run, split)
    if split == "dev":
        return {"train": english, "dev": [*dict.fromkeys((*english, *tested))]}
    return {"train": english, "dev": english, split: tested}


def tested(
    run: config.Run,
    predict: models.Predict,
    params: Any,
    parts: Mapping[str, data.Part],
    text: data.Text,
) -> dict[str, np.ndarray]:
    """Predicts as `probabilities` does; reports how long it took.

    Args:
      run: its configuration.
      predict, params, text: as for `probabilities`.
      parts: language -> the pairs that are tested.
    """
    with process.timed(f"testing {len(parts)} languages"):
        return probabilities(predict, params, parts, text, run.local.eval_batch_size)


def _check_folder(workdir: pathlib.Path, predictions_dir: str) -> None:
    """Checks that predictions will not lie among the files of the run's training."""
    own, given = workdir.resolve(), pathlib.Path(predictions_dir).resolve()
    if not predictions_dir or given.is_relative_to(own / EVALUATED):
        return
    if given.is_relative_to(own):
        raise errors.SettingsError(
            f"--predictions_dir={predictions_dir} is in the run's own folder, which has"
            " the summaries and predictions of its training; name another one, or one"
            f" in its {EVALUATED}/"
        )


def evaluate(run: config.Run, predictions_dir: str) -> int:
    """Tests what a run trained, on the pairs of --data_dir.

    Args:
      run: that has ended, or stopped; its folder is `workdir`.
      predictions_dir: folder to write to; if empty, one in the run's folder.

    Returns:
      The exit status.
    """
    _check_folder(run.local.workdir, predictions_dir)
    split = run.local.split
    needed = {split: data.languages(run, split)}
    trained = restored.read(run)
    model, tokenizer = models.load(run)
    whole = trained.with_trained_rows(model)
    text = data.read(run, needed, whole, tokenizer)
    shape = models.describe(run, text)
    mesh = devices.mesh(run.local.layout(), run.agreed.batch_size)
    fresh = classifier.init(shape, jax.random.key(0), text.model)
    left = trained.as_classifier_params(fresh, models.is_trained(run))
    params, _ = models.place(mesh, left)
    predict, parts = models.predictor(run, shape, mesh), tested_parts(run, text)
    found = tested(run, predict, params, parts, text)

    folder = run.local.workdir / EVALUATED / f"{split}-{text.digest}"
    out = pathlib.Path(predictions_dir or folder)
    report.write_predictions(out, split, parts, found)
    results = report.as_json(report.evaluate(parts, found))
    run_report.write(
        out / "summary.json",
        {
            "command": run_report.command(),
            "commit": run_report.commit(),
            "pairs_from": text.sources[split],
            "selected_step": trained.step,
            split: results,
        },
    )
    title = report.title(split, run.agreed.encoder, trained.step)
    report.show(report.results_markdown(results, title), results["warnings"])
    print(f"report: {out}")
    restored.export(run, trained)
    return 0
