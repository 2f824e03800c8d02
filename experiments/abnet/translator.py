"""A trained ABNet: it translates, and is tested.

A `Translator` has both sides in this process, and no codec between them; `two_sites`
has one of them.

B sentences of a batch.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import configuration
from experiments.abnet import config, evaluation, models, target_model
from nebula_jax import files
from nebula_jax.data import (
    length_buckets,
    parallel_side,
    ragged_rows,
    split_parallel,
    tsv,
)
from nebula_jax.evaluation import bleu
from nebula_jax.models import mixed_precision, transformer
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, run_folder
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import checkpoint

BATCH = 64  # sentences: enough for all cores
NOTHING = "-"  # stands in for an empty line, whose translation is empty


class Source:
    """The source side: it reads sentences."""

    def __init__(
        self, run: config.Run, plm: models.Plm, target: transformer.Config, trained: Any
    ) -> None:
        """Puts the model on this process's device."""
        shapes = plm.model.config, target
        task, self._params = _placed(run, models.SOURCE, plm, shapes, trained)
        self._buckets, self._tokenizer = run.agreed.length_buckets, plm.tokenizer
        self._encode = evaluation.encoder(run.agreed, task)

    def translate(
        self,
        numbered: Sequence[tuple[int, str]],
        rows: int,
        words: Callable[[evaluation.Hidden], Sequence[str]],
    ) -> list[str]:
        """Returns a translation for each line; "" for an empty one.

        There is one line or more; remarks name lines by their numbers. `words` is that
        of `Target`, wherever it is, called with the same number of rows each time, B.
        """
        numbers, lines = zip(*numbered, strict=True)
        buckets, tokenizer = self._buckets, self._tokenizer
        names = [f"line-{number}" for number in numbers]
        text = ragged_rows.tokenize(
            parallel_side.Side(names, [line or NOTHING for line in lines]),
            tokenizer,
            buckets[-1],
            truncate=True,
        )
        for remark in text.warnings():
            process.message(remark)
        found = [""] * len(lines)
        for batch in length_buckets.evaluation_batches(
            length_buckets.bucket_of(text.lengths, buckets), rows, text.lengths
        ):
            ids = text.rows(batch.indices, buckets[batch.bucket], tokenizer.special.pad)
            index = np.array(batch.indices, np.int32)
            index[batch.count :] = -1  # they only fill the batch up
            translated = words(self._encode(self._params, ids, index))
            for place, line in zip(index[: batch.count], translated, strict=False):
                if lines[place]:  # a line stays one, and does nothing to a terminal
                    found[place] = tsv.CONTROL.sub(" ", line)
        return found


class Target:
    """The target side: it writes what the source side has read."""

    def __init__(
        self, run: config.Run, plm: models.Plm, source: transformer.Config, trained: Any
    ) -> None:
        """Puts the model on this process's device; arguments as for `Source`."""
        shapes = source, plm.model.config
        task, self._params = _placed(run, models.TARGET, plm, shapes, trained)
        self._tokenizer = plm.tokenizer
        self._decode = evaluation.decoder(run.agreed, task).translate
        language = config.languages(run.agreed.pair)[1]
        if language != "en" and not plm.tokenizer.library.has_spaces:
            process.message(
                f"the pieces of {run.local.target_model} have no spaces: these are put"
                f" where English has them, which is wrong at some marks of {language}"
            )

    def words(self, hidden: evaluation.Hidden) -> list[str]:
        """Returns the translation of each row, B; "" of one that only fills up."""
        ids = np.asarray(self._decode(self._params, hidden))
        return [
            self._tokenizer.decode(row) if number >= 0 else ""
            for number, row in zip(np.asarray(hidden["index"]), ids, strict=True)
        ]


class Translator:
    """The two sides of a run.

    Translator("runs/abnet_es_en").translate(["una casa", "dos puertas"])
    """

    def __init__(self, run: config.Run | str | os.PathLike[str]) -> None:
        """Reads models and checkpoints of a run that has ended, or saved a step.

        `run` may be its folder; its own paths are relative to where it was started.
        Raises errors.NebulaError if a side is missing, or the checkpoint is of another
        model.
        """
        if isinstance(run, str | os.PathLike):
            run = config.from_flags(configuration.flags_of_run(run, "train_abnet"))
        self.step, (of_source, of_target) = trained_params(run.local.workdir)
        """`step`: optimization steps that they have taken."""
        source, target = models.load_source(run), target_model.load(run)
        self._source = Source(run, source, target.model.config, of_source)
        self._target = Target(run, target, source.model.config, of_target)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Returns a translation for each line; "" for an empty one."""
        return self.part([*enumerate(lines, start=1)], rows_of(lines)) if lines else []

    def part(self, numbered: Sequence[tuple[int, str]], rows: int) -> list[str]:
        """Returns the translations of some lines; see `Source.translate`."""
        return self._source.translate(numbered, rows, self._target.words)


def rows_of(lines: Sequence[Any]) -> int:
    """Returns how many sentences are translated together, B, of so many."""
    return max(1, min(BATCH, len(lines)))


def _placed(
    run: config.Run,
    side: int,
    plm: models.Plm,
    shapes: tuple[transformer.Config, transformer.Config],
    trained: Any,
) -> tuple[abnet_training.Task, Any]:
    """Returns what a side computes with, and its parameters on the device."""
    translator = models.model(run.agreed, *shapes)
    task = models.make_task(run.agreed, translator, plm.tokenizer.special)
    fresh = models.params_of(run.agreed, translator, plm.model, side)
    fresh = mixed_precision.cast_kernels(fresh, plm.model.config.operands)
    whole = checkpoint.put_back(fresh, trained, plm.is_trained)
    return task, jax.device_put(whole)


def trained_params(workdir: pathlib.Path) -> tuple[int, list[Any]]:
    """Returns the newest step that both sides have, and what they had trained then.

    If one process and clusters have saved in the run's folder, it is taken from those
    that have the newer one. Raises errors.NebulaError if there is none.
    """
    step, names = config.newest_saved(workdir, models.ROLES)
    states = [
        checkpoint.read(checkpoints.folder_of(workdir, name), step) for name in names
    ]
    if names == config.WHOLE:
        states = list(states[0])
    return step, [each["state"]["params"] for each in states]


def evaluate(run: config.Run) -> int:
    """Tests what a run trained, on the pairs of --data_dir; returns the exit status.

    These are dev, test and FLORES, as far as there are any; --max_words and
    --bleu_sentences of the run, which has ended or stopped, hold. Raises
    errors.NebulaError if a side is missing, or there is no text of the pair.
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
