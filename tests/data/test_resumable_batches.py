import itertools

import numpy as np
import pytest

from nebula_jax.data import resumable_batches
from nebula_jax.data.tokenizers import vocabulary as vocabularies

SPECIAL = vocabularies.SPECIAL
PAD, CLS, SEP = SPECIAL.pad, SPECIAL.cls, SPECIAL.sep


def corpus(first, count):
    """Sequences [CLS] n [SEP] with n counting from `first`."""
    return [
        {"input_ids": np.asarray([CLS, n, SEP], np.int32)}
        for n in range(first, first + count)
    ]


def stream(seed=0, count=2):
    sources = [
        resumable_batches.Source("a", corpus(100, 40), 0.75),
        resumable_batches.Source("b", corpus(1000, 10), 0.25),
    ]
    numbered = resumable_batches.numbered(sources[:count], 8, 5, seed)
    return resumable_batches.training_batches(numbered)


def test_batches_are_padded_int32():
    batch = next(stream())
    assert batch.shape == (8, 5)
    assert batch.dtype == np.int32
    assert (batch[:, 3:] == PAD).all()
    assert (batch[:, 0] == CLS).all()


def test_sources_are_mixed_by_weight_and_repeat_for_ever():
    text = np.concatenate([b[:, 1] for b in itertools.islice(stream(), 50)])
    assert np.mean(text >= 1000) == pytest.approx(0.25, abs=0.01)
    assert set(text) == {*range(100, 140), *range(1000, 1010)}


def test_the_seed_decides_the_order_and_epochs_differ():
    def text(seed):
        return [b[:, 1].tolist() for b in itertools.islice(stream(seed, 1), 10)]

    assert text(0) == text(0) != text(1)
    assert text(2**32 - 1) != text(0)  # sources' own seeds are beyond what Grain takes
    epochs = text(0)
    assert epochs[:5] != epochs[5:]
    assert np.sort(epochs[:5], None).tolist() == np.sort(epochs[5:], None).tolist()


def test_a_stream_goes_on_exactly_where_it_was():
    first = stream()
    for _ in range(7):
        next(first)
    state = first.get_state()
    expected = [next(first) for _ in range(5)]
    second = stream()
    second.set_state(state)
    np.testing.assert_array_equal([next(second) for _ in range(5)], expected)


def test_language_weights_are_the_formula():
    weights = resumable_batches.language_weights([100, 10, 1], 0.3)
    shares = np.asarray([100, 10, 1]) / 111
    np.testing.assert_allclose(weights, shares**0.3 / np.sum(shares**0.3))
    for exponent, want in ((0.0, [0.5, 0.5]), (1.0, [0.75, 0.25])):
        weights = resumable_batches.language_weights([3, 1], exponent)
        np.testing.assert_allclose(weights, want)


def test_held_out_batches_keep_order_and_end_in_blank_rows():
    first, second = resumable_batches.held_out_batches(corpus(50, 3), 2, 2, 4)
    assert first[:, 1].tolist() == [50, 51]
    assert second.tolist() == [[CLS, 52, SEP, PAD], [PAD] * 4]
