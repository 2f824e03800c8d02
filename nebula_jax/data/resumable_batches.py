"""Batches of packed sequences: shuffled, mixed, padded and resumable (Grain).

B batch, L max_length, P corpora in a mixture.
"""

from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from nebula_jax import errors
from nebula_jax.data.tokenizers import vocabulary as vocabularies

# The records are memory-mapped and small: two readers keep ahead of any model here.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class Source(NamedTuple):
    """One packed corpus and its share of the mixture."""

    name: str
    sequences: Sequence[dict[str, np.ndarray]]
    weight: float
    key: str = ""
    """Digest of the content."""


def language_weights(sizes: Sequence[int], alpha: float) -> np.ndarray:
    """Computes sampling shares q_i ∝ p_i^α, p_i = n_i/Σn (XLM-R, section 3.1).

    Args:
      sizes: n_i, sequences of each language.
      alpha: exponent; 1 samples by size, 0 all languages alike.

    Returns:
      [P] float64, sums to 1.
    """
    shares = np.asarray(sizes, np.float64) / np.sum(sizes)
    weights = shares**alpha
    return weights / weights.sum()


class _Rows:
    """The wanted rows of every batch: batch t has the records t B to t B + B."""

    def __init__(self, records: grain.MapDataset, batch_size: int, rows: slice) -> None:
        self._records, self._batch_size = records, batch_size
        self._rows = range(*rows.indices(batch_size))

    def __len__(self) -> int:
        return len(self._records) // self._batch_size

    def __getitem__(self, number: int) -> np.ndarray:
        first = int(number) * self._batch_size
        return np.stack([self._records[first + row] for row in self._rows])


def training_batches(
    sources: Sequence[Source],
    batch_size: int,
    max_length: int,
    seed: int,
    rows: slice = slice(None),
) -> grain.DatasetIterator:
    """Streams batches without end; the position is `get_state()`, a small dict.

    Args:
      sources: the corpora; one of weight 0 is never read.
      batch_size: B.
      max_length: L.
      seed: of the shuffles, counted modulo 2^32; the same gives the same stream.
      rows: of every batch, those that are wanted; others are not read. The position
        does not depend on it.

    Returns:
      Iterator over [rows, L] int32 arrays, padded with [PAD].

    Raises:
      errors.NebulaError: if a source has no sequence.
    """
    sources = [source for source in sources if source.weight > 0]
    for source in sources:
        if not len(source.sequences):
            raise errors.NebulaError(f"{source.name} has no text to train on")
    streams = [
        grain.MapDataset.source(source.sequences)
        .shuffle((seed + index) % 2**32)  # Grain refuses more
        .repeat()
        for index, source in enumerate(sources)
    ]
    weights = np.asarray([source.weight for source in sources], np.float64)
    records = grain.MapDataset.mix(streams, weights=list(weights / weights.sum())).map(
        lambda record: pad(record["input_ids"], max_length)
    )
    batches = grain.MapDataset.source(_Rows(records, batch_size, rows))
    return iter(batches.to_iter_dataset(READ_OPTIONS))


def held_out_batches(
    sequences: Sequence[dict[str, np.ndarray]],
    batches: int,
    batch_size: int,
    max_length: int,
) -> list[np.ndarray]:
    """Makes the first `batches` batches of a held-out split, in file order.

    Args:
      sequences: of the split.
      batches: number of batches.
      batch_size: B.
      max_length: L.

    Returns:
      [B, L] int32 arrays; rows past the end of the text are [PAD] throughout.
    """
    blank = np.full(
        (batches * batch_size, max_length), vocabularies.SPECIAL.pad, np.int32
    )
    for row in range(min(len(sequences), len(blank))):
        ids = sequences[row]["input_ids"]
        blank[row, : len(ids)] = ids
    return np.split(blank, batches)


def pad(ids: np.ndarray, max_length: int) -> np.ndarray:
    """Pads ids [<=L] int32 with [PAD] to [L]."""
    return np.pad(
        ids, (0, max_length - len(ids)), constant_values=vocabularies.SPECIAL.pad
    )
