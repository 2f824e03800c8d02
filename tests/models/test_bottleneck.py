"""The bottleneck at the cut, against numpy's singular values."""

import jax
import numpy as np
import pytest
import trees

from nebula_jax.models import bottleneck

D = 12
RANDOM = np.random.RandomState(0)
SPECTRUM = 0.6 ** np.arange(D)
TURN = np.linalg.qr(RANDOM.randn(D, D))[0]


def activations(*shape):
    """Tokens around a mean far from 0, most of them near a few directions."""
    values = 3.0 + RANDOM.randn(*shape, D) * SPECTRUM @ TURN
    return values.astype(np.float32)


def best(rows, rank):
    """The best approximation of rows less their mean, and the mean again."""
    mean = rows.mean(axis=0, dtype=np.float64)
    left, values, right = np.linalg.svd(rows - mean, full_matrices=False)
    return mean + (left[:, :rank] * values[:rank]) @ right[:rank]


def through(hidden, start):
    return (hidden - start.mean) @ start.down @ start.up + start.mean


@pytest.mark.parametrize("rank", [1, 4, D])
def test_it_begins_as_the_best_approximation_of_its_rank(rank):
    hidden = activations(6, 20)
    mask = RANDOM.rand(6, 20) < 0.7
    start = bottleneck.start(bottleneck.moments(hidden, mask), rank)
    assert [part.shape for part in start] == [(D, rank), (rank, D), (D,)]
    rows = hidden[mask]
    np.testing.assert_allclose(through(rows, start), best(rows, rank), atol=3e-4)


def test_columns_are_scaled_by_the_square_root_of_their_deviation():
    hidden = activations(5000)
    start = bottleneck.start(bottleneck.moments(hidden, np.ones(5000, bool)), 5)
    sent = (hidden - start.mean) @ start.down
    values = np.linalg.svd(hidden - hidden.mean(0), compute_uv=False)[:5]
    np.testing.assert_allclose((sent**2).mean(0), values / 5e3**0.5, 1e-3)


def test_moments_of_batches_add_up_and_padding_does_not_count():
    hidden, mask = activations(4, 9), RANDOM.rand(4, 9) < 0.5
    whole = bottleneck.moments(hidden, mask)
    parts = [bottleneck.moments(hidden[i], mask[i]) for i in range(4)]
    added = jax.tree.map(lambda *each: sum(each), *parts)
    trees.assert_close(whole, added, rtol=1e-4)
    spoiled = np.where(mask[..., None], hidden, np.nan)
    trees.assert_same(whole, bottleneck.moments(spoiled, mask))


def test_a_reader_reads_the_approximation_through_it():
    hidden = activations(30)
    start = bottleneck.start(bottleneck.moments(hidden, np.ones(30, bool)), 4)
    reader = {"kernel": RANDOM.randn(D, 2, 3), "bias": RANDOM.randn(2, 3)}
    reader = jax.tree.map(np.float32, reader)
    narrow = jax.device_get(bottleneck.read_through(reader, start))
    layer = bottleneck.narrowing(start)
    sent = hidden @ layer["kernel"] + layer["bias"]
    got = np.tensordot(sent, narrow["kernel"], 1) + narrow["bias"]
    want = np.tensordot(through(hidden, start), reader["kernel"], 1) + reader["bias"]
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_directions_without_tokens_stay_finite():
    hidden = np.zeros((10, D), np.float32)
    hidden[:, 0] = np.arange(10)
    start = bottleneck.start(bottleneck.moments(hidden, np.ones(10, bool)), D)
    assert all(np.isfinite(part).all() for part in start)
    np.testing.assert_allclose(through(hidden, start), hidden, atol=1e-3)


def test_bad_input_is_named():
    found = bottleneck.moments(activations(5), np.ones(5, bool))
    for rank in (0, D + 1):
        with pytest.raises(ValueError, match="rank must be 1 to 12"):
            bottleneck.pair(D, rank)
    nothing = bottleneck.moments(activations(5), np.zeros(5, bool))
    infinite = found._replace(products=found.products * np.inf)
    for moments in (nothing, infinite):
        with pytest.raises(ValueError, match="tokens with finite activations"):
            bottleneck.start(moments, 2)


def test_a_pair_around_any_line():
    hidden = activations(40)
    pair = bottleneck.pair(D, 4)
    front, _ = pair.init(jax.random.key(0))
    assert pair.narrow(front, hidden).shape == (40, 4)
    front, back = bottleneck.pair(D, D).init(jax.random.key(0))
    same = pair.widen(back, pair.narrow(front, hidden))
    np.testing.assert_allclose(same, hidden, atol=1e-4)
