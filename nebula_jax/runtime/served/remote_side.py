"""The examples of one side of a parallel corpus that another lab serves.

Lengths and ids are here, since batches are made of them; the tokens of an example come
when a step needs them. A thread requests those of the next steps meanwhile.

N examples, B batch, C capacity of a row.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from nebula_jax import errors
from nebula_jax.data import length_buckets, ragged_rows, read_ahead

UNDER_WAY = 4  # steps whose rows are requested at a time
THREADS = 2

Read = Callable[[Sequence[int]], np.ndarray]
"""Reads rows by their numbers in the whole corpus: [rows, L] int32, padded."""


class RemoteExamples:
    """The examples of a split, as `ragged_rows.TokenRows` gives them.

    `keep` reads some of them for good; `begin` and `next_batch` those of one step after
    the other. `rows` then has those, and reads any other by itself.

    Attributes:
      ids: [N], of the examples.
      lengths: [N] int32, tokens of each.
      key: digest of all that they were made from.
    """

    def __init__(
        self, ids: list[str], lengths: np.ndarray, key: str, first: int, read: Read
    ) -> None:
        """Reads nothing yet.

        Args:
          ids, lengths, key: see the class.
          first: number of the first example in the whole corpus.
          read: reads rows.
        """
        self.ids, self.lengths, self.key = ids, lengths, key
        self._first, self._read = first, read
        self._kept: dict[int, np.ndarray] = {}
        self._batch: dict[int, np.ndarray] = {}
        self._ahead: read_ahead.ReadAhead | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, indices: np.ndarray) -> None:
        """Reads examples that are needed again and again."""
        self._kept |= self._tokens(indices)

    def begin(
        self, order: length_buckets.Schedule, start: int, last: int, ahead: int
    ) -> None:
        """Begins to read the batches of a schedule.

        Args:
          order: of the batches.
          start: step that the run goes on after.
          last: step of the run; none beyond it is read.
          ahead: batches in hand, see `read_ahead.ReadAhead`.

        Raises:
          errors.NebulaError: if they end already.
        """
        made = _Steps(lambda step: self._padded(order.batch(step - 1).indices), last)
        made.set_state(start)
        self._ahead = read_ahead.ReadAhead(made, ahead)
        self._order, self._step = order, start
        self._ahead.begin()

    def next_batch(self) -> None:
        """Goes on to the batch of the next step.

        Raises:
          errors.NebulaError: if it may not be read.
        """
        assert self._ahead is not None  # `begin` has made it
        self._step += 1
        indices = self._order.batch(self._step - 1).indices
        self._batch = dict(zip(indices.tolist(), next(self._ahead), strict=True))

    @property
    def end(self) -> errors.NebulaError | None:
        """The reason why no more batches come; None while they do."""
        return None if self._ahead is None else self._ahead.end

    def rows(self, indices: np.ndarray, capacity: int, pad: int) -> np.ndarray:
        """Copies examples into the rows of a batch; see `ragged_rows.TokenRows.rows`.

        Raises:
          ragged_rows.TokenError: if an example is longer than C.
          errors.NebulaError: if they may not be read.
        """
        lengths = self.lengths[indices]
        if lengths.max(initial=0) > capacity:
            longest = self.ids[indices[int(np.argmax(lengths))]]
            raise ragged_rows.TokenError(
                f"example {longest!r} is longer than a row with room for {capacity}"
            )
        known = self._kept | self._batch
        missing = [each for each in indices.tolist() if each not in known]
        if missing:
            known |= self._tokens(np.asarray(missing))
        rows = np.full((len(indices), capacity), pad, np.int32)
        for row, (index, length) in enumerate(
            zip(indices.tolist(), lengths.tolist(), strict=True)
        ):
            rows[row, :length] = known[index][:length]
        return rows

    def _padded(self, indices: np.ndarray) -> np.ndarray:
        return self._read([self._first + each for each in indices.tolist()])

    def _tokens(self, indices: np.ndarray) -> dict[int, np.ndarray]:
        return dict(zip(indices.tolist(), self._padded(indices), strict=True))


class _Steps:
    """The rows of each step's batch, [B, L] int32; the position is a step."""

    def __init__(self, read: Callable[[int], np.ndarray], last: int) -> None:
        self._read, self._last = read, last
        self._pool = futures.ThreadPoolExecutor(THREADS, "remote")
        self.set_state(0)

    def set_state(self, state: Any) -> None:
        self._step = self._requested = int(state)
        self._under_way: collections.deque[futures.Future[np.ndarray]] = (
            collections.deque()
        )

    def get_state(self) -> int:
        return self._step

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> np.ndarray:
        while self._requested < self._last and len(self._under_way) < UNDER_WAY:
            self._requested += 1
            self._under_way.append(self._pool.submit(self._read, self._requested))
        if not self._under_way:
            self._pool.shutdown(wait=False)
            raise StopIteration
        found = self._under_way.popleft().result()
        self._step += 1
        return found
