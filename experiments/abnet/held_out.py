"""Held-out pairs, after the last step: the loss of each sentence, and counts for BLEU.

The target side computes the loss from the hidden states that are sent for translation,
so it is the loss that the codecs leave, in whatever cluster the source side is.

B batch, M micro-batches, L length of the longest bucket, Q longest target row.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.abnet import config, data
from nebula_jax import files
from nebula_jax.communication import ranks
from nebula_jax.data import split_parallel
from nebula_jax.evaluation import bleu, sentence_scores
from nebula_jax.training import abnet as abnet_training

SPLIT = split_parallel.HELD_OUT

Losses = dict[int, tuple[float, int]]
"""Number of an example -> its loss in nats, and the tokens that this is of."""
LossFn = Callable[[Any, Mapping[str, jax.Array], data.Text], Losses]
"""(parameters of the target side, hidden states as they came, text) -> losses."""


def losses(agreed: config.Agreed, task: abnet_training.Task) -> LossFn:
    """Returns a function that computes the losses of a batch of held-out sentences.

    Its memory is that of a training step: M micro-batches, one after the other.

    Args:
      agreed: of the run.
      task: of the target side.
    """
    parts = agreed.micro_batches

    def of_length(
        params: Any, received: Mapping[str, jax.Array], ids: jax.Array, length: int
    ) -> tuple[jax.Array, jax.Array]:
        hidden = {
            "hidden": received["hidden"][:, :length],
            "mask": received["mask"][:, :length],
            "index": received["index"],
        }
        found = jax.lax.map(
            lambda part: abnet_training.held_out(task, params, *part),
            jax.tree.map(
                lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (hidden, ids)
            ),
        )
        return jax.tree.map(lambda leaf: leaf.reshape(-1), found)

    jitted = jax.jit(of_length, static_argnums=3)

    def of_batch(
        params: Any, received: Mapping[str, jax.Array], text: data.Text
    ) -> Losses:
        index, rows = np.asarray(received["index"]), text.rows[SPLIT]
        examples = np.maximum(index, 0)  # -1 where a row only fills the batch up
        columns = data.bucket_length(agreed, rows.lengths[examples])
        ids = rows.rows(examples, columns, task.target_controls.pad)
        lengths = np.asarray(received["mask"]).sum(axis=1)
        length = data.bucket_length(agreed, lengths)
        found = ranks.everywhere(jitted(params, dict(received), ids, length))
        each = zip(index.tolist(), *(np.asarray(part) for part in found), strict=True)
        return {
            number: (float(nats), int(tokens))
            for number, nats, tokens in each
            if number >= 0
        }

    return of_batch


def scores(
    text: data.Text, losses: Losses, translations: Sequence[str], tokenize: str
) -> sentence_scores.Scores:
    """Returns the scores of all held-out sentences.

    Args:
      text: of the target side.
      losses: of each of them.
      translations: of each of them, in their order.
      tokenize: for BLEU, from `bleu.tokenizer_of`.
    """
    ids = text.ids[SPLIT]
    nats, tokens = zip(*(losses[number] for number in range(len(ids))), strict=True)
    references = text.sentences[SPLIT]
    counts = bleu.statistics(translations, references, tokenize=tokenize)
    return sentence_scores.Scores(ids, np.asarray(nats), np.asarray(tokens), counts)


def figures(found: sentence_scores.Scores) -> dict[str, float]:
    """Returns what is recorded of them, beside the BLEU: loss, its error, tokens."""
    loss = sentence_scores.loss(found)
    return {
        "loss": loss.mean,
        "standard_error": loss.standard_error,
        "tokens": float(found.tokens.sum()),
    }


def path(translations: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the file of the scores after `step`.

    Args:
      translations: folder of the target cluster's translations.
      step: the last one.
    """
    return translations / f"{SPLIT}-{step:08d}.scores.tsv"


def write(translations: pathlib.Path, step: int, found: sentence_scores.Scores) -> None:
    """Writes the scores beside the translations; see `path`."""
    with files.writing(path(translations, step)) as partial:
        partial.write_text(sentence_scores.dumps(found), "utf-8")
