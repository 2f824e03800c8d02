"""Translates lines with a trained ABNet, both of its sides in this process.

    python -m experiments.translate --run=runs/abnet_es_en < spanish.txt > english.txt

A line of input is a sentence, and gives a line of output. `--run` is the folder of a
run that trained both sides here. The flags of the run hold; --beams and --iterations
may be given.

B sentences of a batch, l length of its bucket, Q longest target row.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments import configuration, shared_flags
from experiments.abnet import config, evaluation, models, target_model
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.data import length_buckets, parallel_side, ragged_rows, tsv
from nebula_jax.models import abnet, mixed_precision
from nebula_jax.runtime.life import process
from nebula_jax.training import checkpoint, checkpoint_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The settings that no run keeps: they choose what this command does."""

    run: str
    # Those of the run that may be replaced.
    beams: int
    iterations: int
    pretrained_dir: pathlib.Path


FLAGS = fields.define(Command)

BATCH = 64  # sentences: enough for all cores
NOTHING = "-"  # stands in for an empty line, whose translation is empty
WHOLE, SIDES = ("whole",), ("source", "target")
LAYOUTS = (WHOLE, SIDES)
"""Folders of a run that together have what both sides trained."""
CHECKPOINTS = "checkpoints"


def main() -> int:
    """Translates standard input."""
    command = fields.read(Command)
    configuration.parse_run(command.run, "train_abnet")
    run = config.from_flags()
    config.check_beams(run.agreed)
    given = tsv.lines(pathlib.Path("standard input"), sys.stdin.buffer)
    lines = [line.strip() for _, line in given]
    if not lines:
        return 0
    for line in Translator(run).translate(lines):
        # As it was read, whatever the locale: a replaced character is a wrong word.
        sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


class Translator:
    """The two sides of a run."""

    def __init__(self, run: config.Run) -> None:
        """Reads models and checkpoints of a run that has ended, or saved a step.

        Raises:
          errors.NebulaError: if a side is missing, or the checkpoint is of another
            model.
        """
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
        trained = trained_params(run.local.workdir)
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


def trained_params(workdir: pathlib.Path) -> list[Any]:
    """Returns what the two sides trained, after the newest step that both have.

    If one process and clusters have saved in the run's folder, it is taken from those
    that have the newer one.

    Raises:
      errors.NebulaError: if there is none.
    """
    layouts = [
        names
        for names in LAYOUTS
        if all((workdir / name / CHECKPOINTS).is_dir() for name in names)
    ] or [SIDES]
    saved = {
        name: checkpoint_files.verified_steps(
            workdir / name / CHECKPOINTS, process.message
        )
        for name in itertools.chain.from_iterable(layouts)
    }
    common = [
        (step, names)
        for names in layouts
        for step in set.intersection(*(set(saved[name]) for name in names))
    ]
    if not common:
        have = "; ".join(
            f"{name} has {', '.join(map(str, each)) or 'none'}"
            for name, each in saved.items()
        )
        raise errors.NebulaError(f"{workdir}: no checkpoint of both sides ({have})")
    step, names = max(common, key=lambda each: each[0])
    if len(layouts) > 1:
        process.message(f"{workdir}: step {step} of {' and '.join(names)}")
    states = [checkpoint.read(workdir / name / CHECKPOINTS, step) for name in names]
    if names == WHOLE:
        states = list(states[0])
    return [each["state"]["params"] for each in states]


if __name__ == "__main__":
    shared_flags.run(main, names=FLAGS)
