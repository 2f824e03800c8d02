"""A trained ABNet, both of its sides in this process: it translates, and is tested.

What crosses between two clusters goes through no codec here.

B sentences of a batch, l length of its bucket, Q longest target row.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import configuration
from experiments.abnet import config, evaluation, models, target_model
from nebula_jax import errors, files
from nebula_jax.data import (
    length_buckets,
    parallel_side,
    ragged_rows,
    split_parallel,
)
from nebula_jax.evaluation import bleu
from nebula_jax.models import abnet, mixed_precision
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, run_folder
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import checkpoint

BATCH = 64  # sentences: enough for all cores
NOTHING = "-"  # stands in for an empty line, whose translation is empty
WHOLE, SIDES = ("whole",), ("source", "target")
LAYOUTS = (WHOLE, SIDES)
"""Folders of a run that together have what both sides trained."""


class Translator:
    """The two sides of a run.

    Translator("runs/abnet_es_en").translate(["una casa", "dos puertas"])
    """

    def __init__(self, run: config.Run | str | os.PathLike[str]) -> None:
        """Reads models and checkpoints of a run that has ended, or saved a step.

        Args:
          run: or its folder; the run's own paths are relative to where it was started.

        Raises:
          errors.NebulaError: if a side is missing, or the checkpoint is of another
            model.
        """
        if isinstance(run, str | os.PathLike):
            run = config.from_flags(configuration.flags_of_run(run, "train_abnet"))
        self.step, trained = trained_params(run.local.workdir)
        """`step`: optimization steps that they have taken."""
        self._agreed = agreed = run.agreed
        self._source = models.load_source(run)
        self._target = target_model.load(run)
        translator = models.model(
            agreed, self._source.model.config, self._target.model.config
        )
        self._task = models.make_task(
            agreed,
            translator,
            self._source.tokenizer.special,
            self._target.tokenizer.special,
        )
        fresh = (
            models.params_of(agreed, translator, self._source.model, models.SOURCE),
            models.params_of(agreed, translator, self._target.model, models.TARGET),
        )
        plms = self._source, self._target
        self._params = [
            jax.device_put(
                checkpoint.put_back(
                    mixed_precision.cast_kernels(params, plm.model.config.operands),
                    side,
                    plm.is_trained,
                )
            )
            for params, side, plm in zip(fresh, trained, plms, strict=True)
        ]
        language = config.languages(agreed.pair)[1]
        if language != "en" and not self._target.tokenizer.library.has_spaces:
            process.message(
                f"the pieces of {run.local.target_model} have no spaces: these are put"
                f" where English has them, which is wrong at some marks of {language}"
            )
        self._run = jax.jit(self._translate)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Returns a translation for each line; "" for an empty one."""
        buckets, tokenizer = self._agreed.length_buckets, self._source.tokenizer
        names = [f"line-{number}" for number in range(1, len(lines) + 1)]
        rows = ragged_rows.tokenize(
            parallel_side.Side(names, [line or NOTHING for line in lines]),
            tokenizer,
            buckets[-1],
            truncate=True,
        )
        for remark in rows.warnings():
            process.message(remark)
        found = [""] * len(lines)
        for batch in length_buckets.evaluation_batches(
            length_buckets.bucket_of(rows.lengths, buckets),
            min(BATCH, len(lines)),
            rows.lengths,
        ):
            ids = rows.rows(batch.indices, buckets[batch.bucket], tokenizer.special.pad)
            translated = np.asarray(self._run(self._params, ids))
            indices = batch.indices[: batch.count]
            for index, row in zip(indices, translated, strict=False):
                if lines[index]:
                    found[index] = self._target.tokenizer.decode(row)
        return found

    def _translate(self, params: Sequence[Any], input_ids: jax.Array) -> jax.Array:
        """Translates [B, l] int32 to [B, Q] int32."""
        mask = input_ids != self._task.source_controls.pad
        encoded = abnet.encode(self._task.config, params[0], input_ids, mask)
        translated = evaluation.translate(
            self._agreed, self._task, params[1], encoded, mask
        )
        return translated.ids


def trained_params(workdir: pathlib.Path) -> tuple[int, list[Any]]:
    """Returns the newest step that both sides have, and what they had trained then.

    If one process and clusters have saved in the run's folder, it is taken from those
    that have the newer one.

    Raises:
      errors.NebulaError: if there is none.
    """
    layouts = [
        names
        for names in LAYOUTS
        if all(checkpoints.folder_of(workdir, name).is_dir() for name in names)
    ] or [SIDES]
    common, missing = [], []
    for names in layouts:
        try:
            common.append((checkpoints.newest_in_all(workdir, names), names))
        except checkpoint.CheckpointError as error:
            missing.append(str(error))
    if not common:
        raise errors.NebulaError(
            f"{'; '.join(missing)}; the folders of both clusters have to be in it"
        )
    step, names = max(common, key=lambda each: each[0])
    if len(layouts) > 1:
        process.message(f"{workdir}: step {step} of {' and '.join(names)}")
    states = [
        checkpoint.read(checkpoints.folder_of(workdir, name), step) for name in names
    ]
    if names == WHOLE:
        states = list(states[0])
    return step, [each["state"]["params"] for each in states]


def evaluate(run: config.Run) -> int:
    """Tests what a run trained, on the pairs of --data_dir; returns the exit status.

    These are dev, test and FLORES, as far as there are any; --max_words and
    --bleu_sentences of the run hold.

    Args:
      run: that has ended, or stopped; its folder is `workdir`.

    Raises:
      errors.NebulaError: if a side is missing, or there is no text of the pair.
    """
    agreed, local = run.agreed, run.local
    languages = config.languages(agreed.pair)
    tested = split_parallel.pairs_to_test(local.data_dir, languages, local.max_words)
    translator = Translator(run)
    words, found = bleu.tokenizer_of(languages[1]), {}
    how = [translator.step, agreed.beams, agreed.iterations, agreed.bleu_sentences]
    digest = files.digest_of([*how, *sorted(tested.items())])
    out = local.workdir / run_folder.EVALUATED / f"{agreed.pair}-{digest}"
    out.mkdir(parents=True, exist_ok=True)
    for split, pairs in tested.items():
        sources, references = zip(*pairs[: agreed.bleu_sentences], strict=True)
        with process.timed(f"translating {len(sources)} sentences of {split}"):
            lines = translator.translate(sources)
        score = bleu.corpus_bleu(lines, references, tokenize=words)
        found[split] = {"bleu": score.score, "sentences": len(lines)}
        with files.writing(out / f"{split}.txt") as partial:
            partial.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    record = {
        "command": run_report.command(),
        "commit": run_report.commit(),
        "text_from": local.data_dir,
        "step": translator.step,
        "tests": found,
    }
    run_report.write(out / "summary.json", record)
    run_report.show(markdown(record))
    process.progress(f"report: {out}")
    return 0


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the BLEU of each test set."""
    cells = [
        [split, run_report.figure(each["bleu"], ".2f"), f"{each['sentences']:,}"]
        for split, each in record["tests"].items()
    ]
    return run_report.join(
        f"Pairs of {record['text_from']}, after step {record['step']}:",
        run_report.table(["test set", "BLEU", "sentences"], cells),
    )
