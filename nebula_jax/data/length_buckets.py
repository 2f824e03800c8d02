"""Which examples make up batch t: both clusters work it out, and nobody says it.

A pure function of the number of examples, the length bucket of each, batch size, seed
and step. Batches are of one bucket, so that padding does not eat the time, and any
batch can be had without those before it.

N examples, B batch, M micro-batches, S batches of an epoch.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax import errors

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BATCHES = 256  # in the place of a bucket: no uint8 is that large


class ScheduleError(errors.NebulaError):
    """Batches that cannot be made."""


class Batch(NamedTuple):
    """The examples of a training step.

    bucket: none of them is of a longer one.
    indices: [B] int32.
    """

    bucket: int
    indices: np.ndarray


class EvaluationBatch(NamedTuple):
    """Examples to evaluate on.

    bucket: none of them is of a longer one.
    indices: [B] int32. A batch that is not full repeats its last example.
    count: how many of them are to be counted, from the first.
    """

    bucket: int
    indices: np.ndarray
    count: int


class Schedule:
    """Training batches in an order that two clusters compute alike.

    An epoch has N // B batches. In a bucket's shuffled examples, what is left over
    after whole batches is carried to the next longer bucket, where it fits as well; so
    a rare length is trained on too, and fewer than B examples are left over in all.
    Those are not in this epoch. Which they are is drawn anew each epoch.

    >>> schedule = Schedule(np.zeros(1000, np.uint8), batch_size=8, seed=0)
    >>> schedule.batch(step=200).indices.shape
    (8,)
    """

    def __init__(self, buckets: np.ndarray, batch_size: int, seed: int):
        """Takes what the order depends on.

        Args:
          buckets: [N] uint8, length bucket of each example (see `bucket_of`).
          batch_size: B.
          seed: of the shuffles, not negative.

        Raises:
          ScheduleError: if there are fewer than B examples.
        """
        if len(buckets) < batch_size:
            raise ScheduleError(
                f"{len(buckets)} examples are fewer than one batch of {batch_size}"
            )
        self._buckets = np.asarray(buckets, np.uint8)
        self._batch_size = batch_size
        self._seed = seed
        # Two, because a pipeline has steps of two epochs in flight where they meet.
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """S = N // B."""
        return len(self._buckets) // self._batch_size

    def batch(self, step: int) -> Batch:
        """The examples of step `step`, counted from 0."""
        if step < 0:
            raise ScheduleError(f"step {step}: steps are counted from 0")
        epoch, place = divmod(step, self.steps_per_epoch)
        buckets, indices = self._epoch(epoch)
        return Batch(int(buckets[place]), indices[place])

    def _shuffled_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """[S] buckets and [S, B] indices of an epoch."""
        buckets: list[int] = []
        batches: list[np.ndarray] = []
        carried = np.zeros(0, np.int64)
        for bucket in np.unique(self._buckets).tolist():
            pool = np.append(carried, np.flatnonzero(self._buckets == bucket))
            pool = pool[shuffled(len(pool), self._seed, epoch, bucket)]
            whole = len(pool) // self._batch_size
            taken, carried = np.split(pool, [whole * self._batch_size])
            buckets += [bucket] * whole
            batches.append(taken.reshape(whole, self._batch_size))
        order = shuffled(len(buckets), self._seed, epoch, _BATCHES)
        indices = np.concatenate(batches).astype(np.int32)[order]
        indices.flags.writeable = False  # it is kept, and handed out
        return np.asarray(buckets)[order], indices


def shuffled(count: int, *words: int) -> np.ndarray:
    """0 ... count-1 in an order that depends on `words` alone.

    Sorted by a hash of our own: NumPy does not promise that its shuffles stay what they
    are, and two clusters may well have different versions of it.

    Args:
      count: how many.
      words: numbers of at most 64 bits, none negative.

    Returns:
      [count] int64.
    """
    state = np.zeros(1, np.uint64)
    for word in words:
        state = _splitmix(state + np.uint64(word))
    numbers = np.arange(count, dtype=np.uint64)
    return np.argsort(_splitmix(state + numbers * _GAMMA), kind="stable")


def _splitmix(state: np.ndarray) -> np.ndarray:
    """The next number of SplitMix64 (Steele, Lea, Flood 2014) for each state."""
    z = state + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def micro_batches(indices: np.ndarray, count: int) -> np.ndarray:
    """[B] -> [M, B / M]: a batch in `count` equal parts, in order.

    Raises:
      ScheduleError: if B is no multiple of M.
    """
    if count < 1 or len(indices) % count:
        raise ScheduleError(
            f"a batch of {len(indices)} cannot be cut into {count} equal micro-batches"
        )
    return indices.reshape(count, -1)


def bucket_of(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """The shortest bucket that each example fits into.

    Args:
      lengths: [N] integers, tokens of each example.
      capacities: tokens that a bucket has room for, strictly ascending, at most 256.

    Returns:
      [N] uint8.

    Raises:
      ScheduleError: at other capacities, or an example longer than the last.
    """
    ascending = all(np.diff(capacities) > 0)
    if not capacities or len(capacities) > 256 or not ascending:
        raise ScheduleError(
            f"capacities {list(capacities)}: expected 1 to 256 ascending numbers"
        )
    if len(lengths) and np.max(lengths) > capacities[-1]:
        raise ScheduleError(
            f"an example has {np.max(lengths)} tokens; the longest bucket has room for"
            f" {capacities[-1]}"
        )
    return np.searchsorted(capacities, lengths).astype(np.uint8)


def evaluation_batches(
    buckets: np.ndarray, batch_size: int, lengths: np.ndarray | None = None
) -> list[EvaluationBatch]:
    """All examples once, the shortest first, so that few positions are padding.

    Args:
      buckets: [N] uint8, length bucket of each example.
      batch_size: B.
      lengths: [N] integers, to sort by within a bucket. A side that knows only the
        buckets leaves them out; then so must the other.

    Raises:
      ScheduleError: if there is no example.
    """
    if not len(buckets):
        raise ScheduleError("there is no example to evaluate on")
    within = np.zeros(len(buckets), np.int64) if lengths is None else lengths
    order = np.lexsort((within, buckets)).astype(np.int32)  # stable: then by index
    batches = []
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        indices = np.pad(part, (0, batch_size - len(part)), mode="edge")
        batches.append(EvaluationBatch(int(buckets[part[-1]]), indices, len(part)))
    return batches
