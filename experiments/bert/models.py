"""The model of a BERT run, random or pretrained at first, and the encoder it leaves."""

import pathlib
from typing import Any, NamedTuple

from experiments.bert import config
from experiments.pretraining import hot_start
from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models.pretrained import trimming
from nebula_jax.parallel import rules
from nebula_jax.runtime.life import process
from nebula_jax.training import bert


class Models(NamedTuple):
    """The model of a run, as all of its clusters have it."""

    config: bert.Config
    encoder: dict[str, Any] | None  # `embeddings` and `encoder`; None for random ones


def load(run: config.Run, vocabulary: vocabularies.Vocabulary) -> Models:
    """Returns the model that a run's configuration describes.

    Raises errors.NebulaError if --hot_start cannot be had, the vocabulary is not of it,
    or --fragments does not divide its layers.
    """
    agreed, local = run.agreed, run.local
    trimmed = hot_start.load(agreed, local, vocabulary)
    if trimmed is None:
        shape = hot_start.shape_of_size(
            agreed, local, agreed.model_size, agreed.layers, vocabulary.size
        )
        params = None
    else:
        layers = agreed.layers or trimmed.config.layers
        first = trimming.first_layers(trimmed, layers)
        shape, params = first.config, first.params
    if agreed.sync != "allreduce" and shape.layers % agreed.fragments:
        nearest = rules.nearest_divisor(shape.layers, agreed.fragments)
        raise errors.SettingsError(
            f"--fragments={agreed.fragments} does not divide the {shape.layers} layers"
            f" of the encoder; {nearest} does"
        )
    return Models(config.model(agreed, shape), params)


def describe(run: config.Run, made: Models) -> dict[str, Any]:
    """Returns what a summary has of the model."""
    shape = made.config.encoder
    return {
        "hot_start": run.local.hot_start,
        "encoder": {"layers": shape.layers, "width": shape.width},
    }


def export(
    folder: pathlib.Path,
    run: config.Run,
    made: Models,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the encoder and its tokenizer, unless only adapters have trained.

    No checkpoint format has adapters between layers, and the encoder is as it was. The
    model's parameters are on the root's host.
    """
    if run.agreed.trains != "all":
        if ranks.is_root():
            process.message(
                f"--trains={run.agreed.trains}: no encoder is exported, since it has"
                " not trained; the adapters are in the checkpoints"
            )
        return
    hot_start.write(
        folder,
        run.agreed,
        run.local,
        made.config.encoder,
        vocabulary,
        params,
        run.agreed.groups(),
    )
