"""A student's text, the figures of its evaluations, and the encoder that it leaves.

grain and tensorflow_datasets are imported here, though a teacher needs neither: while
they are imported, they change how all threads import, which JAX does not survive if a
teacher is a thread beside, as in a notebook.

B rows, L length.
"""

import functools
from collections.abc import Callable
from typing import Any

import grain  # noqa: F401
import jax
import numpy as np

import nebula_jax as nebula
from experiments import configuration
from experiments.pretraining import hot_start
from experiments.pretraining import text as text_lib
from experiments.students import config
from nebula_jax.data import (
    language_mixture,
    packed_text,  # noqa: F401
    resumable_batches,
    text_folder,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process
from nebula_jax.training import bert, distillation


def text_of(
    settings: config.Settings,
    place: configuration.Place,
    vocabulary: vocabularies.Vocabulary,
) -> tuple[Any, list[tuple[str, np.ndarray]]]:
    """Prepares the text, in the batches that pretrain_bert would have of it alone.

    Returns number, from 0 -> [B, L] int32; language and [B, L] int32 held-out batches.
    """
    folder = text_lib.folder(place)
    if list(settings.languages) == [text_lib.ALL]:
        languages = text_folder.languages(folder)
    else:
        names = " ".join(settings.languages)
        groups = language_mixture.parse_groups(names, "languages", "student")
        languages = [name for group in groups for name in group]
    data = language_mixture.open_generator(
        folder,
        languages,
        {"mrtd": 1.0, "trtd": 0.0},
        language_mixture.SamplingExponents(settings.mono_alpha),
        vocabulary=vocabulary,
        max_length=settings.max_length,
        prepared_dir=place.prepared_dir,
    )
    language_mixture.check_known(data.held_out, process.message)
    size, length = settings.batch_size, settings.max_length
    seed = text_lib.seed_of(settings.seed, 0)
    held_out = [
        (language, batch)
        for language in languages
        for batch in resumable_batches.held_out_batches(
            data.held_out[language],
            settings.eval_batches,
            settings.eval_batch_size,
            length,
        )
    ]
    return resumable_batches.numbered(data.sources, size, length, seed), held_out


def evaluator(
    run: nebula.Run, model: bert.Config, held_out: list[tuple[str, np.ndarray]]
) -> Callable[[int, Any], None]:
    """Returns what records the student's loss on held-out text after a step."""
    sums = jax.jit(functools.partial(bert.evaluate, model))

    def evaluated(step: int, params: Any) -> None:
        evaluate = functools.partial(sums, params)
        with run.context.evaluating():
            found = text_lib.masked_lm_figures(held_out, evaluate)
        run.context.record.evaluation(step, found)

    return evaluated


def export(
    run: nebula.Run,
    settings: config.Settings,
    made: distillation.Config,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the student as pretrain_bert writes an encoder, unless it cannot."""
    if vocabulary.rows is not None:
        process.message(
            "no encoder is written: its pieces are of a pretrained tokenizer; the"
            " student is in its checkpoints"
        )
        return
    count = len(run.clusters) - 1
    about = f"It learned from {count} teacher{'s' * (count > 1)} for {settings.steps:,}"
    about += f" steps on text in {' '.join(settings.languages)}."
    params = jax.device_get(params)
    hot_start.write_own(run.folder, made.model.encoder, vocabulary, params, about)
