"""Translates lines with a trained ABNet, both of its sides in this process.

    python -m experiments.translate --run=runs/abnet_es_en < spanish.txt > english.txt

A line of input is a sentence, and gives a line of output. `--run` is the folder of a
run that trained both sides here. The flags of the run hold; --beams and --iterations
may be given.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import lifecycle, shared_flags
from experiments.abnet import config as abnet_config
from experiments.abnet import data as abnet_data
from experiments.abnet import models as abnet_models
from experiments.abnet import target
from nebula_jax import errors
from nebula_jax.data import length_buckets, parallel_side, ragged_rows
from nebula_jax.models import abnet, param_shapes, transformer
from nebula_jax.training import checkpoint, cut

flags.adopt_module_key_flags(shared_flags)
flags.adopt_module_key_flags(abnet_config)
flags.adopt_module_key_flags(abnet_data)

RUN = flags.DEFINE_string("run", "", "The run's folder.")
STEP = flags.DEFINE_integer(
    "step", None, "Which checkpoint; the newest that both sides have if not given."
)
BATCH = 64  # sentences: enough for all cores
NOTHING = "-"  # stands in for an empty line, whose translation is empty


def main() -> int:
    """Translates standard input."""
    folder = shared_flags.take_run_flags(RUN.value, "train_abnet")
    sys.stdin.reconfigure(encoding="utf-8")
    text = sys.stdin.read()
    if not text:
        return 0
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    translator = Translator(folder, STEP.value)
    for line in translator.translate(lines):
        print(line)
    return 0


class Translator:
    """Both sides of a run."""

    def __init__(self, folder: pathlib.Path, step: int | None = None):
        """Reads models and checkpoints.

        Args:
          folder: of the run, whose flags have been read.
          step: of the checkpoint; None for the newest.

        Raises:
          NebulaError: if a side is missing, or the checkpoint is of another model.
        """
        self._source, self._target = (
            abnet_models.load_source(),
            abnet_models.load_target(),
        )
        config = abnet_config.config(
            self._source.model.config, self._target.model.config
        )
        self._task = abnet_config.task(
            config,
            abnet_config.controls(self._source.words),
            abnet_config.controls(self._target.words),
        )
        trained, self.step = trained_params(folder, step)
        whole = (
            abnet_models.source_params(config, self._source.model),
            abnet_models.target_params(config, self._target.model),
        )
        is_trained = (
            abnet_models.is_trained_source,
            abnet_models.is_trained_target(),
        )
        self._params = [
            jax.device_put(_filled(params, own, which, plm.model.config))
            for params, own, which, plm in zip(
                *(whole, trained, is_trained, (self._source, self._target)),
                strict=True,
            )
        ]
        self._run = jax.jit(self._translate)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """A translation for each line; "" for an empty one."""
        longest = abnet_config.buckets()[-1]
        words = self._source.words
        names = [f"line-{number}" for number in range(1, len(lines) + 1)]
        rows = ragged_rows.tokenise(
            parallel_side.Side(names, [line or NOTHING for line in lines]),
            words,
            longest,
            unknown=words.special.unk,
            before=(words.special.cls,),
            after=(words.special.sep,),
            truncate=True,
        )
        for remark in rows.remarks():
            lifecycle.say(remark)
        buckets = length_buckets.bucket_of(rows.lengths, abnet_config.buckets())
        found = [""] * len(lines)
        size = min(BATCH, len(lines))
        for batch in length_buckets.evaluation_batches(buckets, size, rows.lengths):
            capacity = abnet_config.buckets()[batch.bucket]
            ids = rows.rows(batch.indices, capacity, words.special.pad)
            translated = np.asarray(self._run(self._params, ids).ids)
            for index, row in zip(
                batch.indices[: batch.count], translated, strict=False
            ):
                if lines[index]:
                    found[index] = self._target.words.decode(row)
        return found

    def _translate(self, params: Any, input_ids: jax.Array):
        mask = input_ids != self._source.words.special.pad
        encoded = abnet.encode(self._task.config, params[0], input_ids, mask)
        return target.translate(self._task, params[1], encoded, mask)


def trained_params(folder: pathlib.Path, step: int | None) -> tuple[list[Any], int]:
    """What the two sides trained, and after which step.

    Args:
      folder: of the run.
      step: of the checkpoint; None for the newest that both have.

    Raises:
      NebulaError: if there is none.
    """
    names = ["whole"] if (folder / "whole").is_dir() else ["source", "target"]
    folders = [folder / name / "checkpoints" for name in names]
    steps = [set(checkpoint.verified_steps(each, lifecycle.say)) for each in folders]
    common = set.intersection(*steps)
    if not common or (step is not None and step not in common):
        have = "; ".join(
            f"{name} has {', '.join(map(str, sorted(own))) or 'none'}"
            for name, own in zip(names, steps, strict=True)
        )
        what = "any step" if step is None else f"step {step}"
        raise errors.NebulaError(f"{folder}: no checkpoint of {what} ({have})")
    step = max(common) if step is None else step
    states = [checkpoint.read(each, step) for each in folders]
    if names == ["whole"]:
        states = list(states[0])
    return [each["state"]["params"] for each in states], step


def _filled(
    params: Any, trained: Any, is_trained: cut.IsTrained, config: transformer.Config
) -> Any:
    """`params` with what was trained in the place of what it began with."""
    wanted, frozen = cut.split(params, is_trained)
    param_shapes.check(trained, wanted, "checkpoint", "the run's configuration")
    return cut.merge(trained, transformer.as_operands(frozen, config))


if __name__ == "__main__":
    lifecycle.run(main)
