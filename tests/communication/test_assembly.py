import jax
import numpy as np
import pytest

from nebula_jax.communication import assembly

SIZE = assembly.RECYCLED_BYTES


def address(array):
    return array.__array_interface__["data"][0]


def test_large_memory_is_used_again_once_nobody_looks_at_it():
    recycler = assembly.Recycler()
    first = recycler.empty(SIZE)
    second = recycler.empty(SIZE)
    assert address(first) % assembly.ALIGNMENT == 0
    assert not np.shares_memory(first, second)
    where = address(first)
    del first
    assert address(recycler.empty(SIZE)) == where


@pytest.mark.parametrize(
    "look",
    [
        lambda buffer: buffer[10:20],
        lambda buffer: buffer.view(np.float32).reshape(4, -1),
        memoryview,
        lambda buffer: jax.device_put(buffer.view(np.float32)),
    ],
    ids=["slice", "view", "memoryview", "device"],
)
def test_memory_that_somebody_still_looks_at_is_left_alone(look):
    recycler = assembly.Recycler()
    buffer = recycler.empty(SIZE)
    buffer[:] = 7
    view = look(buffer)
    before = np.asarray(view).tobytes()
    del buffer
    for _ in range(12):
        recycler.empty(SIZE)[:] = 9
    assert np.asarray(view).tobytes() == before


def test_no_more_is_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(assembly, "KEPT_BYTES", 10 * SIZE)
    recycler = assembly.Recycler()
    for size in range(SIZE, SIZE + 100):
        recycler.empty(size)[:] = 1
        kept = [raw.size for raws in recycler._kept.values() for raw in raws]
        assert sum(kept) <= 12 * SIZE


def test_sizes_that_never_come_again_are_not_kept():
    recycler = assembly.Recycler()
    parts = assembly.Assembly(recycler)
    parts.take([SIZE, 2 * SIZE], recycled=False)
    assert not recycler._kept
