"""Batches of packed sequences: shuffled, mixed, padded and resumable (Grain).

B batch, L max_length, P corpora in a mixture.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nebula_jax import errors, installed
from nebula_jax.data.tokenizers import vocabulary as vocabularies

if TYPE_CHECKING:
    import grain


class Source(NamedTuple):
    """One packed corpus and its share of the mixture."""

    name: str
    sequences: Sequence[dict[str, np.ndarray]]
    weight: float
    key: str = ""  # digest of the content


def language_weights(sizes: Sequence[int], alpha: float) -> np.ndarray:
    """Computes sampling shares q_i ∝ p_i^α, p_i = n_i/Σn (XLM-R, section 3.1).

    Of n_i sequences of each language; α = 1 samples by size, 0 all languages alike.
    Returns [P] float64 of sum 1.
    """
    shares = np.asarray(sizes, np.float64) / np.sum(sizes)
    weights = shares**alpha
    return weights / weights.sum()


Place = tuple[Sequence[dict[str, np.ndarray]], int]  # sequences of a source, and which
Fetch = Callable[[Sequence[Place]], Sequence[np.ndarray]]
"""Reads the ids of many sequences at once, each [<=L] int32."""


def fetch_each(places: Sequence[Place]) -> list[np.ndarray]:
    """Reads the ids of sequences one after the other: from a disk, that costs least."""
    return [sequences[number]["input_ids"] for sequences, number in places]


def _place(sequences: Sequence[dict[str, np.ndarray]], number: int) -> Place:
    return sequences, int(number)


def training_batches(batches: "grain.MapDataset") -> "grain.DatasetIterator":
    """Streams batches, mostly endless; `get_state()` is the position, a small dict."""
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
    """Returns the batches of a stream, [rows, L] int32 with [PAD], by number from 0.

    Args:
      sources: the corpora, each with some sequence.
      seed: of the shuffles, counted modulo 2^32; the same gives the same stream.
      rows: those wanted of every batch; others are not read. No position depends on it.
      fetch: reads the rows of a batch; called by several threads.
      most: batches of the stream, from its beginning; none beyond them is read ahead.
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
    """Makes the first batches of a held-out split, [B, L] int32 each, in file order.

    Rows past the end of the text are [PAD] throughout.
    """
    rows = np.full(
        (batches * batch_size, max_length), vocabularies.SPECIAL.pad, np.int32
    )
    for number in range(min(len(sequences), len(rows))):
        rows[number] = pad(sequences[number]["input_ids"], max_length)
    return np.split(rows, batches)


def pad(ids: np.ndarray, max_length: int) -> np.ndarray:
    """Pads ids [<=L] int32 with [PAD] to [L]."""
    return np.pad(
        ids, (0, max_length - len(ids)), constant_values=vocabularies.SPECIAL.pad
    )


class ReadAhead:
    """A stream of batches of which so many are in hand before they are due.

    A cluster cannot end at any step: when it requests the end, others may be a few
    steps further on (`parallel.pace`), and it has to reach the last step that all agree
    on. So whoever reads from a source that may end, as a grant does, reads ahead.

    `end` is the error with which they ended, from the moment when fewer than `count`
    are left, None before it and at the stream's end. Before that moment, one more than
    are still needed are in hand.
    """

    def __init__(self, batches: "grain.DatasetIterator", count: int) -> None:
        """Reads nothing yet; batches raise errors.NebulaError when no more come."""
        self._batches, self._count = batches, count
        self._ready: collections.deque[tuple[np.ndarray, Any]] = collections.deque()
        self._state = batches.get_state()
        self.end: errors.NebulaError | None = None  # the reason why no more come
        self._is_whole = False

    def begin(self) -> None:
        """Reads the first batches; raises `end` if too few come to begin a step."""
        self._fill()
        if self.end is not None and len(self._ready) < self._count - 1:
            raise self.end

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> np.ndarray:
        """Returns the next batch, and reads another in its place.

        Raises StopIteration at the end of the stream, or the error that ended it.
        """
        if not self._ready:
            self._fill()
        if not self._ready:
            raise self.end or StopIteration
        batch, self._state = self._ready.popleft()
        self._fill()
        return batch

    def get_state(self) -> Any:
        """Returns the position after the batches returned, not after those read."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Goes to a position; what was read is dropped."""
        self._batches.set_state(state)
        self._ready.clear()
        self._state, self._is_whole = state, False

    def _fill(self) -> None:
        while len(self._ready) < self._count and not (self.end or self._is_whole):
            try:
                batch = next(self._batches)
            except StopIteration:
                self._is_whole = True
            except errors.NebulaError as error:
                self.end = error
            else:
                self._ready.append((batch, self._batches.get_state()))
