import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from nebula_jax.data import length_buckets

EXAMPLES = st.lists(st.integers(0, 4), min_size=6, max_size=200)


def epoch_of(order, epoch):
    first = epoch * order.steps_per_epoch
    return [order.batch(first + place) for place in range(order.steps_per_epoch)]


@hypothesis.given(EXAMPLES, st.integers(1, 6), st.integers(0, 2**32))
def test_an_epoch_has_every_example_once_but_fewer_than_a_batch(buckets, size, seed):
    order = length_buckets.Schedule(np.asarray(buckets, np.uint8), size, seed)
    for epoch in (0, 3):
        batches = epoch_of(order, epoch)
        indices = np.concatenate([batch.indices for batch in batches])
        assert indices.dtype == np.int32
        assert len(set(indices.tolist())) == len(indices)
        assert 0 <= len(buckets) - len(indices) < size


@hypothesis.given(EXAMPLES, st.integers(1, 6))
def test_a_batch_is_of_one_bucket_but_for_what_shorter_ones_left_over(buckets, size):
    buckets = np.asarray(buckets, np.uint8)
    shorter = collections.Counter()
    for batch in epoch_of(length_buckets.Schedule(buckets, size, 0), 0):
        assert batch.indices.shape == (size,)
        assert (buckets[batch.indices] <= batch.bucket).all()
        assert (buckets[batch.indices] == batch.bucket).any()
        shorter[batch.bucket] += int((buckets[batch.indices] < batch.bucket).sum())
    assert all(count < size for count in shorter.values())


def test_epochs_and_seeds_differ_and_buckets_are_mixed():
    buckets = np.asarray([0] * 80 + [1] * 80, np.uint8)

    def order(seed, epoch):
        batches = epoch_of(length_buckets.Schedule(buckets, 8, seed), epoch)
        return [batch.indices.tolist() for batch in batches]

    assert order(0, 0) == order(0, 0)
    # Not only in another order: other examples share a batch.
    assert grouped(order(0, 0)) != grouped(order(0, 1))
    assert grouped(order(0, 0)) != grouped(order(1, 0))
    schedule = length_buckets.Schedule(buckets, 8, 0)
    first, second = (
        [batch.bucket for batch in epoch_of(schedule, epoch)] for epoch in (0, 1)
    )
    assert first != second
    assert first not in (sorted(first), sorted(first, reverse=True))
    of_first, of_second = (
        [[i % 80 for i in ids] for ids in order(0, 0) if ids[0] // 80 == bucket]
        for bucket in (0, 1)
    )
    assert grouped(of_first) != grouped(of_second)  # no two buckets are shuffled alike


def grouped(batches):
    """Which examples share a batch, whatever their order."""
    return {frozenset(batch) for batch in batches}


def test_any_batch_can_be_had_without_those_before():
    buckets = np.asarray([0, 1] * 50, np.uint8)
    forwards = length_buckets.Schedule(buckets, 8, 5)
    batches = [forwards.batch(step) for step in range(40)]
    backwards = length_buckets.Schedule(buckets, 8, 5)
    for step in (39, 0, 12, 11, 25):
        batch = backwards.batch(step)
        assert batch.bucket == batches[step].bucket
        np.testing.assert_array_equal(batch.indices, batches[step].indices)


def test_the_order_never_changes_between_versions():
    """Clusters of different NumPy have to agree: the published Philox4x64-10, with the
    known answers of its authors (Random123's kat_vectors)."""
    most = 2**64 - 1
    assert philox([0] * 4, [0] * 2) == [
        *(0x16554D9ECA36314C, 0xDB20FE9D672D0FDC),
        *(0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ]
    assert philox([most] * 4, [most] * 2) == [
        *(0x87B092C3013FE90B, 0x438C3C67BE8D0224),
        *(0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ]
    for words in ((1, 2, 3), (0, 0, 0), (2**64 - 1, 5, 256)):
        found = length_buckets.shuffled(11, *words)
        assert found.tolist() == shuffled_by_hand(11, *words)
    assert length_buckets.shuffled(0, 1).tolist() == []


def philox(counter, key):
    """Four numbers, with Python's integers: ten rounds of two multiplications."""
    low = 2**64 - 1
    for _ in range(10):
        one, two = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (two >> 64) ^ counter[1] ^ key[0],
            two & low,
            (one >> 64) ^ counter[3] ^ key[1],
            one & low,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & low, (key[1] + 0xBB67AE8584CAA73B) & low]
    return counter


def shuffled_by_hand(count, seed, epoch, bucket):
    """NumPy counts from 1: its counter is incremented before every four numbers."""
    numbers = [
        number
        for block in range(1, count // 4 + 2)
        for number in philox([block, 0, 0, bucket], [seed, epoch])
    ]
    return sorted(range(count), key=numbers.__getitem__)


def test_what_cannot_be_scheduled_is_an_error():
    with pytest.raises(length_buckets.ScheduleError, match="3 examples are fewer"):
        length_buckets.Schedule(np.zeros(3, np.uint8), 4, 0)


def test_an_example_goes_into_the_shortest_bucket_it_fits():
    buckets = length_buckets.bucket_of(np.asarray([1, 8, 9, 16, 32]), (8, 16, 32))
    assert buckets.tolist() == [0, 0, 1, 1, 2]
    assert buckets.dtype == np.uint8


@hypothesis.given(EXAMPLES, st.integers(1, 6))
def test_every_example_is_evaluated_once_the_shortest_first(lengths, size):
    lengths = np.asarray(lengths)
    buckets = length_buckets.bucket_of(lengths, (1, 3, 4))
    batches = length_buckets.evaluation_batches(buckets, size, lengths)
    seen = np.concatenate([batch.indices[: batch.count] for batch in batches])
    assert sorted(seen.tolist()) == list(range(len(lengths)))
    assert (np.diff(lengths[seen]) >= 0).all()
    for batch in batches:
        assert batch.indices.shape == (size,)
        assert batch.bucket == buckets[batch.indices].max()
        assert (batch.indices[batch.count :] == batch.indices[batch.count - 1]).all()
    assert all(batch.count == size for batch in batches[:-1])


@pytest.mark.parametrize("counts", [(994, 3), (19000, 970, 20), (7, 1, 1)])
def test_a_longest_bucket_that_fills_no_batch_is_trained_on_too(counts):
    """As often as any: by carrying alone it would be left out of every epoch."""
    size = {2: 8, 3: 32}[len(counts)] if counts[0] > 7 else 8
    buckets = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    schedule = length_buckets.Schedule(buckets, size, seed=0)
    visits, epochs = np.zeros(len(buckets), int), 60
    for epoch in range(epochs):
        batches = epoch_of(schedule, epoch)
        seen = np.concatenate([each.indices for each in batches])
        assert len(set(seen.tolist())) == len(seen) == len(buckets) // size * size
        assert all((buckets[b.indices] <= b.bucket).all() for b in batches)
        visits[seen] += 1
    longest = visits[buckets == buckets.max()]
    assert longest.mean() > 0.75 * epochs
    assert visits.min() > 0  # others are left out in each epoch
