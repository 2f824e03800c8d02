"""Batches of real text, in which half of the positions are padding.

A run's own text is packed: whole sentences are joined while they fit, so there is
little padding that a layout could save. Text of documents has more: half of BERT's own
is padding, in sequences of 512 tokens (Krell et al. 2021, arXiv 2107.02027). So each
packed sequence is cut off at a length that is drawn evenly.

B sequences of a batch, one a row; L length; G groups of devices; N micro-batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.bert import config, data
from nebula_jax.data import joined_rows
from nebula_jax.data.tokenizers import vocabulary as vocabularies

PAD, SEP = vocabularies.SPECIAL.pad, vocabularies.SPECIAL.sep
SHORTEST = 1 / 8
"""The shortest sequence, as a share of L: our choice."""


class Text(NamedTuple):
    """The batches of a measurement.

    packed: K arrays [B, L] int32, as the run reads them.
    cut: the same, cut off at drawn lengths.
    """

    packed: Sequence[np.ndarray]
    cut: Sequence[np.ndarray]


def read(run: config.Run, vocabulary: vocabularies.Vocabulary, count: int) -> Text:
    """Reads the first batches of a run.

    Args:
      run: with one cluster.
      vocabulary: of the run.
      count: K.

    Raises:
      errors.NebulaError: if the text cannot be had.
    """
    with data.text_of(run, 0, vocabulary) as text:
        text.begin(None, run.agreed.batch_size)
        packed = [next(text.batches) for _ in range(count)]
    random = np.random.Generator(np.random.Philox(run.agreed.seed))
    return Text(packed, [cut(each, random) for each in packed])


def cut(input_ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Cuts sequences off, each at a length drawn from SHORTEST of L to L.

    Args:
      input_ids: [B, L] int32, padded.
      random: draws the lengths.

    Returns:
      [B, L] int32; what was cut off is [PAD], and what is left ends with [SEP].
    """
    rows, most = input_ids.shape
    drawn = random.integers(int(SHORTEST * most), most, rows, endpoint=True)
    lengths = np.minimum(drawn, joined_rows.lengths(input_ids, PAD))
    places = np.arange(most)
    found = np.where(places < lengths[:, None], input_ids, PAD)
    return np.where(places == lengths[:, None] - 1, SEP, found).astype(np.int32)


def padding(batches: Sequence[np.ndarray]) -> float:
    """Returns the share of positions that are padding.

    Args:
      batches: of arrays [B, L] int32.
    """
    return float(np.mean([each == PAD for each in batches]))


def joined_share(
    batches: Sequence[np.ndarray], groups: int, micro_batches: int
) -> float:
    """Returns the smallest `bert.Config.joined_share` that leaves no sequence out.

    Args:
      batches: K arrays [B, L].
      groups: G; each has sequences and rows of its own.
      micro_batches: N; G N divides B and the rows.
    """
    height, length = batches[0].shape
    parts = groups * micro_batches
    lengths = [joined_rows.lengths(each, PAD) for each in batches]
    rows = next(
        rows
        for rows in range(parts, height + 1, parts)
        if not any(
            joined_rows.plan(each, length, rows, groups).left_out for each in lengths
        )
    )
    return (rows - 0.5) / height  # which is rounded up to `rows`
