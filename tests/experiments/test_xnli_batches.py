import collections

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import clusters, xnli_batches, xnli_text
from nebula_jax.data import token_rows

LENGTHS = [5, 20, 7, 9] * 6


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(batch_size=3, length_buckets=["12", "24"], seed=1):
        yield


def part():
    """Pairs of two kinds: every third is an mnli."""
    ids = [f"{'mnli' if n % 3 == 0 else 'snli'}-{n}" for n in range(len(LENGTHS))]
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    nothing = np.zeros(0, np.int32)
    tokens = np.zeros(offsets[-1], np.int32)
    rows = token_rows.TokenRows(ids, tokens, offsets, nothing, nothing)
    return xnli_text.Part(rows, np.zeros(len(ids), np.int32))


def seen(batches, steps):
    return collections.Counter(
        index for step in steps for index in batches.batch(step).indices.tolist()
    )


def test_all_pairs_come_before_those_that_are_seen_last():
    with flagsaver.flagsaver(epochs=2.0, finish_on=["mnli"], finish_epochs=3.0):
        batches = xnli_batches.Batches(part())
    first = 2 * len(LENGTHS) // 3
    assert batches.steps == first + 3 * (len(LENGTHS) // 3 // 3)
    assert len(seen(batches, range(first))) == len(LENGTHS)
    last = seen(batches, range(first, batches.steps))
    assert last.keys() <= set(range(0, len(LENGTHS), 3))
    for step in range(batches.steps):
        bucket, indices = batches.batch(step)
        assert len(indices) == 3
        assert {int(LENGTHS[index] > 12) for index in indices} == {bucket}


def test_without_them_or_with_a_number_of_steps_it_is_as_long_as_it_says():
    with flagsaver.flagsaver(epochs=1.5):
        assert xnli_batches.Batches(part()).steps == 12
    with flagsaver.flagsaver(steps=9, finish_on=["mnli"], finish_epochs=1.0):
        batches = xnli_batches.Batches(part())
        assert batches.steps == 9
        last = seen(batches, range(9 - len(LENGTHS) // 3 // 3, 9))
        assert last.keys() <= set(range(0, len(LENGTHS), 3))


def test_beginnings_that_no_pair_has_are_refused():
    with (
        flagsaver.flagsaver(finish_on=["anli"]),
        pytest.raises(clusters.FlagError, match="--finish_on=anli: no training pair"),
    ):
        xnli_batches.Batches(part())
