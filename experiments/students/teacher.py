"""A teacher as it is read: a masked language model of the student's vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import configuration
from experiments.students import config
from nebula_jax import errors
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages, trimming
from nebula_jax.runtime.life import process


def read(
    name: str,
    settings: config.Settings,
    place: configuration.Place,
    vocabulary: vocabularies.Vocabulary,
) -> tuple[transformer.Config, Any]:
    """Reads a teacher, with its pieces in the order of the vocabulary.

    Returns the shape of its encoder, and the parameters of a `masked_lm.MaskedLM`.
    Raises errors.NebulaError if it cannot be read, cannot predict masked pieces, or
    does not have every piece of the vocabulary.
    """
    folder = packages.resolve_checkpoint(name, place.pretrained_dir, process.message)
    model, tokenizer = pretrained.load_with_tokenizer(
        folder,
        settings.max_length,
        log=process.message,
        dtype=settings.dtype,
        dropout=0.0,
    )
    if "mlm_head" not in model.params:
        raise errors.SettingsError(
            f"teachers={name}: it has no head that predicts masked pieces; take a"
            " masked language model, such as pretrain_bert leaves one"
        )
    ids = {tokenizer.piece(number): number for number in range(tokenizer.size)}
    pieces = [vocabulary.piece(number) for number in range(vocabulary.size)]
    if missing := [each for each in pieces if each not in ids]:
        raise errors.SettingsError(
            f"teachers={name}: its tokenizer lacks {len(missing)} of {len(pieces)}"
            f" pieces of vocabulary={vocabulary.path}, such as {missing[0]}; all"
            " clusters share one vocabulary, of which each teacher has every piece"
        )
    model = trimming.select_rows(model, np.asarray([ids[each] for each in pieces]))
    parts = ("embeddings", "encoder", "mlm_head")
    return model.config, jax.tree.map(
        jnp.asarray, {part: model.params[part] for part in parts}
    )
