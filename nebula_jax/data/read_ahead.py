"""Batches read ahead, so that some are left when no more come.

A cluster cannot end at any step: when it requests the end, others may be a few steps
further on (`parallel.pace`), and it has to reach the last step that all agree on. So
whoever reads from a source that may end, as a grant does, has those batches in hand.
"""

import collections
from typing import TYPE_CHECKING, Any

import numpy as np

from nebula_jax import errors

if TYPE_CHECKING:
    import grain


class ReadAhead:
    """A stream of batches of which so many are in hand before they are due.

    `end` is the error with which they ended, from the moment when fewer than `count`
    are left. Before that moment, one more than are still needed are in hand.
    """

    def __init__(self, batches: "grain.DatasetIterator", count: int) -> None:
        """Reads nothing yet.

        Args:
          batches: raise errors.NebulaError when no more come.
          count: in hand, from 1.
        """
        self._batches, self._count = batches, count
        self._ready: collections.deque[tuple[np.ndarray, Any]] = collections.deque()
        self._state = batches.get_state()
        self.end: errors.NebulaError | None = None
        """The reason why no more come; None while they do, and at the stream's end."""
        self._is_whole = False

    def begin(self) -> None:
        """Reads the first batches.

        Raises:
          errors.NebulaError: the reason, if so few come that no step may be begun.
        """
        self._fill()
        if self.end is not None and len(self._ready) < self._count - 1:
            raise self.end

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> np.ndarray:
        """Returns the next batch, and reads another in its place.

        Raises:
          StopIteration: at the end of the stream.
          errors.NebulaError: if it has ended before.
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
