import numpy as np
import pytest

from nebula_jax.data import joined_rows


def test_a_sequence_goes_to_the_first_row_that_has_room():
    found = joined_rows.plan(np.array([4, 5, 2, 0, 3]), max_length=6, rows=3)
    x = -1  # nothing
    np.testing.assert_array_equal(
        found.where,
        [
            [0, 1, 2, 3, 12, 13],  # sequences 0 and 2
            [6, 7, 8, 9, 10, x],  # sequence 1
            [24, 25, 26, x, x, x],  # sequence 4; 3 has no token
        ],
    )
    assert found.left_out == 0


def test_tokens_are_counted_up_to_the_padding():
    ids = np.array([[1, 7, 8, 0], [1, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8]])
    np.testing.assert_array_equal(joined_rows.lengths(ids, 0), [3, 1, 0, 4])


def test_a_row_has_few_sequences():
    """Else a row of short ones would have more masked tokens than slots."""
    found = joined_rows.plan(np.ones(10, int), max_length=32, rows=10)
    count = np.sum(found.where >= 0, axis=-1)
    assert list(count[:3]) == [joined_rows.MOST, joined_rows.MOST, 2]
    assert not count[3:].any()


def test_what_finds_no_room_is_left_out_and_counted():
    found = joined_rows.plan(np.array([5, 5, 5, 1]), max_length=6, rows=2)
    assert found.left_out == 1
    np.testing.assert_array_equal(np.sum(found.where >= 0, axis=-1), [6, 5])
    assert 3 * 6 in found.where  # a later, shorter one still found some


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_token_stands_once_in_order_within_its_group(groups):
    random = np.random.RandomState(groups)
    size, length = 32, 16
    lengths = random.randint(0, length + 1, size)
    found = joined_rows.plan(lengths, length, rows=size, groups=groups)
    assert found.left_out == 0  # as many rows as sequences are always enough
    for where, own in zip(
        np.split(found.where, groups), np.split(lengths, groups), strict=True
    ):
        places = where[where >= 0]
        wanted = [n * length + at for n, count in enumerate(own) for at in range(count)]
        np.testing.assert_array_equal(np.sort(places), wanted)
        for row in where[where[:, 0] >= 0]:
            text = row[row >= 0]
            assert (row[: len(text)] >= 0).all()  # pads are at the end
            same = np.diff(text // length) == 0
            assert (np.diff(text)[same] == 1).all()  # a sequence stands together
            assert len(np.unique(text // length)) == 1 + np.sum(~same)
