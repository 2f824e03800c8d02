import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.models import mask_slots

L, SLOTS = 16, 5


def drawn(rows=8, seed=0):
    """Positions of 0 to 5 distinct places a row, and the marks they stand for."""
    random = np.random.RandomState(seed)
    marks = np.zeros((rows, L), bool)
    positions = np.full((rows, SLOTS), L, np.int32)
    for row in range(rows):
        places = np.sort(random.permutation(L)[: row % (SLOTS + 1)])
        marks[row, places] = True
        positions[row, : len(places)] = places
    return positions, marks


def test_marks_and_positions_are_each_others_inverse():
    positions, marks = drawn()
    np.testing.assert_array_equal(mask_slots.mark(positions, L), marks)
    found = mask_slots.find(jnp.asarray(marks), SLOTS)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(
        mask_slots.find(jnp.asarray(marks), 2), positions[:, :2]
    )


@pytest.mark.parametrize("tail", [(), (3,)])
def test_values_are_read_where_positions_say_and_empty_slots_are_zero(tail):
    positions, _ = drawn()
    values = np.random.RandomState(1).randn(8, L, *tail).astype(np.float32)
    read = np.asarray(mask_slots.gather(values, positions))
    padded = np.concatenate([values, np.zeros((8, 1, *tail), np.float32)], axis=1)
    for row in range(8):
        np.testing.assert_array_equal(read[row], padded[row, positions[row]])


def test_values_are_read_at_places_of_the_whole_batch():
    values = np.random.RandomState(1).randn(4, L, 3).astype(np.float32)
    places = np.asarray([0, 17, 40, 63, 64, 64], np.int32)
    read = np.asarray(mask_slots.gather_positions(values, places))
    np.testing.assert_array_equal(read[:4], values.reshape(-1, 3)[places[:4]])
    assert not read[4:].any()


def test_values_are_written_where_positions_say_and_nowhere_else():
    positions, marks = drawn()
    values = np.arange(8 * L, dtype=np.int32).reshape(8, L)
    written = -np.arange(1, 8 * SLOTS + 1, dtype=np.int32).reshape(8, SLOTS)
    result = np.asarray(mask_slots.scatter(values, positions, written))
    np.testing.assert_array_equal(result[~marks], values[~marks])
    np.testing.assert_array_equal(result[marks], written[positions < L])
