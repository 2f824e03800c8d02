"""Batches of packed sequences: shuffled, mixed, padded and resumable (Grain).

B batch, L max_length, P corpora in a mixture.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nebula_jax import installed
from nebula_jax.data.tokenizers import vocabulary as vocabularies

if TYPE_CHECKING:
    import grain


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


Place = tuple[Sequence[dict[str, np.ndarray]], int]
"""The sequences of a source, and the number of one of them."""

Fetch = Callable[[Sequence[Place]], Sequence[np.ndarray]]
"""Reads the ids of many sequences at once, each [<=L] int32."""


def fetch_each(places: Sequence[Place]) -> list[np.ndarray]:
    """Reads the ids of sequences one after the other: from a disk, that costs least."""
    return [sequences[number]["input_ids"] for sequences, number in places]


def _place(sequences: Sequence[dict[str, np.ndarray]], number: int) -> Place:
    return sequences, int(number)


def training_batches(batches: "grain.MapDataset") -> "grain.DatasetIterator":
    """Streams batches, mostly without end; the position is `get_state()`, a small dict.

    Returns:
      Iterator over them.
    """
    import grain  # here, since most processes read no text

    # The records are memory-mapped and small: two readers keep ahead of any model here.
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(options))


def numbered(
    sources: Sequence[Source],
    batch_size: int,
    max_length: int,
    seed: int,
    rows: slice = slice(None),
    fetch: Fetch = fetch_each,
    most: int | None = None,
) -> "grain.MapDataset":
    """Returns the batches of a stream by their numbers, from 0.

    Args:
      sources: the corpora, each with some sequence.
      seed: of the shuffles, counted modulo 2^32; the same gives the same stream.
      rows: of every batch, those that are wanted; others are not read. The position
        does not depend on it.
      fetch: reads the rows of a batch; called by several threads.
      most: batches of the stream, from its beginning; none beyond them is read ahead.

    Returns:
      Number -> [rows, L] int32 array, padded with [PAD].
    """
    with installed.extra("experiments"):
        import grain

    # Numbers of sequences are shuffled and mixed; sequences are read by the batch.
    streams = [
        grain.MapDataset.range(len(source.sequences))
        .shuffle((seed + index) % 2**32)  # Grain refuses more
        .repeat()
        .map(functools.partial(_place, source.sequences))
        for index, source in enumerate(sources)
    ]
    weights = np.asarray([source.weight for source in sources], np.float64)
    records = grain.MapDataset.mix(streams, weights=list(weights / weights.sum()))

    def read(number: int) -> np.ndarray:
        """Reads the wanted rows of batch t, whose records are t B to t B + B."""
        wanted = range(number * batch_size, (number + 1) * batch_size)[rows]
        places = [records[record] for record in wanted]
        return np.stack([pad(ids, max_length) for ids in fetch(places)])

    count = len(records) // batch_size if most is None else most
    return grain.MapDataset.range(count).map(read)


def held_out_batches(
    sequences: Sequence[dict[str, np.ndarray]],
    batches: int,
    batch_size: int,
    max_length: int,
) -> list[np.ndarray]:
    """Makes the first `batches` batches of a held-out split, in file order.

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
