"""The evaluation of a discriminator: on held-out text, and by probes of seconds each.

How near translations lie in its encoder, and how large the gradients of its two losses
are. Both change long before a fine-tuned encoder would show that something is wrong.

B rows of a micro-batch, L length, P pairs of a language.
"""

import functools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.m3 import config, models
from experiments.pretraining import text
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.evaluation import rtd, translations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import page
from nebula_jax.training import m3, m3_predictions


class Probes:
    """The probes of one run's discriminator."""

    def __init__(
        self,
        run: config.Run,
        made: models.Models,
        vocabulary: vocabularies.Vocabulary,
        mesh: Mesh,
        fresh: mesh_lib.ShardedInit,
    ) -> None:
        """Reads the pairs, if there are any here; compiles nothing yet."""
        everywhere = mesh_lib.replicated(mesh)
        params = fresh.sharding.params
        self._put = functools.partial(mesh_lib.put, where=everywhere)
        self._embed = jax.jit(
            functools.partial(m3_predictions.sentence_vectors, made.config),
            in_shardings=(params, everywhere),
            out_shardings=everywhere,
        )
        self._norms = jax.jit(
            functools.partial(m3_predictions.gradient_norms, made.config),
            out_shardings=everywhere,
        )
        # Where other organizations have sent the text, none of it is written to disk.
        is_here = process.LIFELINE_FD in os.environ or run.local.cluster == "whole"
        self._keeps_samples = is_here and not run.local.federation
        self._pairs, self._piece = _pairs(run, vocabulary), vocabulary.piece

    def evaluate(
        self,
        context: context_lib.Context,
        step: int,
        predictions: Iterable[tuple[str, m3_predictions.Predictions]],
        params: Any,
        tokens: Sequence[m3.Tokens],
    ) -> None:
        """Records figures on held-out text, and the probes.

        There are no `tokens` before the first step, which has no gradient yet.
        """
        found: dict[str, list[m3_predictions.Predictions]] = {}
        with context.evaluating():
            for language, each in predictions:
                found.setdefault(language, []).append(jax.device_get(each))
            figures = self.measure(params, tokens)
        reports = {language: rtd.report(each) for language, each in found.items()}
        if self._keeps_samples and ranks.is_root():
            samples = [
                f"{language}: {rtd.sample(batches[0], 0, self._piece)}"
                for language, batches in found.items()
            ]
            page.write_samples(context.folder, samples)
        context.record.evaluation(step, reports)
        context.record.probe(step, figures)

    def measure(
        self, params: Any, tokens: Sequence[m3.Tokens]
    ) -> dict[str, float | dict[str, float]]:
        """Returns the figures of the probes: numbers, or language -> number."""
        found: dict[str, float | dict[str, float]] = {}
        if tokens:
            norms = jax.device_get(self._norms(params, list(tokens)))
            found |= {name: float(norm) for name, norm in norms.items()}

        def embed(batch: np.ndarray) -> np.ndarray:
            return jax.device_get(self._embed(params, self._put(batch)))

        probed = {
            language: translations.figures(embed(each.english), embed(each.foreign))
            for language, each in self._pairs.items()
        }
        for name in translations.FIGURES if probed else ():
            found[name] = {language: each[name] for language, each in probed.items()}
        return found


def _pairs(
    run: config.Run, vocabulary: vocabularies.Vocabulary
) -> dict[str, translations.Pairs]:
    """Returns the dev pairs of this cluster's --data_dir; none where it has none."""
    local, agreed = run.local, run.agreed
    if not local.probe_pairs or local.coordinator:  # each process would need the text
        return {}
    folder = pathlib.Path(local.data_dir)
    if local.data_dir.startswith("package:"):
        folder = text.written(local)
    if not folder.is_dir():
        return {}
    languages = [language for group in agreed.groups() for language in group]
    return translations.read(
        folder,
        languages,
        vocabulary,
        local.probe_pairs,
        agreed.max_length,
        agreed.parallel_pairs,
    )
