"""Batches of examples of similar length, in an order that two clusters compute alike.

Batch t is a pure function of the number of examples, the length bucket of each, batch
size, seed and step: no cluster sends it, and it needs no batch before it. A batch has
examples of one bucket, so that little time goes into padding.

N examples, B batch, S batches of an epoch.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax import errors

_BATCHES, _LEFT_OUT = 256, 257
"""In the place of a bucket, above any uint8: for the order of batches, and for the
choice of examples that stay out of an epoch."""


class ScheduleError(errors.NebulaError):
    """A schedule of batches that cannot be made."""


class Batch(NamedTuple):
    """The examples of a training step, or of a batch in evaluation.

    A batch that is not full repeats its last example, after `count` that it has.
    """

    bucket: int  # the longest of any of them
    indices: np.ndarray  # [B] int32
    count: int  # type: ignore[assignment]  # hides a method of tuples


class Schedule:
    """The training batches, shuffled anew in each epoch.

    An epoch has N // B batches. Of a bucket's shuffled examples, those left over after
    whole batches are carried to the next longer bucket, where they fit as well; what is
    left over there is left out of the epoch. If the longest bucket and what is carried
    to it make no batch, as many examples of any length are left out instead. So a rare
    length is trained on too, and fewer than B examples are left out of an epoch, others
    in each.

    >>> schedule = Schedule(np.zeros(1000, np.uint8), batch_size=8, seed=0)
    >>> schedule.batch(step=200).indices.shape
    (8,)
    """

    def __init__(self, buckets: np.ndarray, batch_size: int, seed: int) -> None:
        """Prepares the order; no epoch is shuffled yet.

        Of each example's bucket, [N] uint8 (see `bucket_of`), and a seed below 2^64.
        ScheduleError if there are fewer than B examples.
        """
        if len(buckets) < batch_size:
            raise ScheduleError(
                f"{len(buckets)} examples are fewer than one batch of {batch_size}"
            )
        self._buckets = np.asarray(buckets, np.uint8)
        self._batch_size = batch_size
        self._seed = seed
        counts = np.unique(self._buckets, return_counts=True)[1]
        carried = counts[:-1].sum() % batch_size
        self._is_longest_rare = bool(carried + counts[-1] < batch_size)
        # Two, because a pipeline has steps of two epochs in flight where they meet.
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches, S = N // B."""
        return len(self._buckets) // self._batch_size

    def batch(self, step: int) -> Batch:
        """Returns the examples of step `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        buckets, indices = self._epoch(epoch)
        return Batch(int(buckets[place]), indices[place], self._batch_size)

    def _shuffled_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes the buckets [S] and the indices [S, B] int32 of an epoch."""
        buckets: list[int] = []
        batches: list[np.ndarray] = []
        is_in = np.ones(len(self._buckets), bool)
        if self._is_longest_rare:
            examples = shuffled(len(is_in), self._seed, epoch, _LEFT_OUT)
            is_in[examples[: len(is_in) % self._batch_size]] = False
        carried = np.zeros(0, np.int64)
        for bucket in np.unique(self._buckets).tolist():
            found = np.flatnonzero((self._buckets == bucket) & is_in)
            pool = np.append(carried, found)
            pool = pool[shuffled(len(pool), self._seed, epoch, bucket)]
            whole = len(pool) // self._batch_size
            taken, carried = np.split(pool, [whole * self._batch_size])
            buckets += [bucket] * whole
            batches.append(taken.reshape(whole, self._batch_size))
        order = shuffled(len(buckets), self._seed, epoch, _BATCHES)
        indices = np.concatenate(batches).astype(np.int32)[order]
        indices.flags.writeable = False  # it is kept, and handed out
        return np.asarray(buckets)[order], indices


def shuffled(count: int, seed: int, epoch: int = 0, bucket: int = 0) -> np.ndarray:
    """Orders 0 ... count-1 by random numbers of (seed, epoch, bucket) alone.

    The numbers are Philox's (Salmon et al. 2011), whose key is seed and epoch; the
    bucket is the highest word of its counter, so that no two buckets share a number.
    Clusters may have different versions of NumPy: the docstring of `np.random.Philox`
    has a Compatibility Guarantee ("will always produce the same random integer
    stream"), which NumPy gives for no shuffle. Seed, epoch and bucket are 0 or more and
    less than 2^64. Returns [N] int64.
    """
    generator = np.random.Philox(
        key=np.asarray([seed, epoch], np.uint64),
        counter=np.asarray([0, 0, 0, bucket], np.uint64),
    )
    return np.argsort(generator.random_raw(count), kind="stable")


def bucket_of(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """Finds the shortest bucket, [N] uint8, that examples of lengths [N] fit into.

    Lengths (integers) and capacities are in tokens; `capacities`, at most 256, strictly
    ascend, and no example is longer than the last.
    """
    return np.searchsorted(capacities, lengths).astype(np.uint8)


def evaluation_batches(
    buckets: np.ndarray, batch_size: int, lengths: np.ndarray
) -> list[Batch]:
    """Batches all examples once, the shortest first, so that little is padding.

    `buckets` are [N] uint8; within one, `lengths` [N] integers give the order.
    """
    order = np.lexsort((lengths, buckets)).astype(np.int32)  # stable: then by index
    batches = []
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        indices = np.pad(part, (0, batch_size - len(part)), mode="edge")
        batches.append(Batch(int(buckets[part[-1]]), indices, len(part)))
    return batches
