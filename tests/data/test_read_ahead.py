import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.data import resumable_batches


class Ending:
    """Batches 0, 1, ... of which the first `count` come."""

    def __init__(self, count):
        self.count, self.next, self.tries = count, 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.count:
            self.tries += 1
            raise errors.NebulaError("the grant is spent")
        self.next += 1
        return np.asarray([self.next - 1])

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


def test_batches_come_in_order_and_the_position_is_that_of_those_returned():
    ahead = resumable_batches.ReadAhead(Ending(100), 4)
    ahead.begin()
    assert ahead.get_state() == {"next": 0}
    assert [int(next(ahead)[0]) for _ in range(7)] == list(range(7))
    assert ahead.get_state() == {"next": 7}
    ahead.set_state({"next": 3})
    assert int(next(ahead)[0]) == 3
    assert ahead.get_state() == {"next": 4}


@pytest.mark.parametrize("window", [0, 1, 5])
def test_at_the_end_as_many_are_left_as_a_cluster_may_still_need(window):
    """A stop before step s is at step s + window at the latest."""
    source = Ending(20)
    ahead = resumable_batches.ReadAhead(source, window + 2)
    ahead.begin()
    taken = 0
    while ahead.end is None:
        assert int(next(ahead)[0]) == taken
        taken += 1
    assert 20 - taken == window + 1
    for number in range(taken, 20):
        assert int(next(ahead)[0]) == number
    with pytest.raises(errors.NebulaError, match="spent"):
        next(ahead)
    assert source.tries == 1


def test_too_few_batches_to_begin_with_are_an_error():
    for count in (0, 1, 2):
        with pytest.raises(errors.NebulaError, match="spent"):
            resumable_batches.ReadAhead(Ending(count), 4).begin()
    resumable_batches.ReadAhead(Ending(3), 4).begin()


def test_the_end_of_a_stream_is_no_error():
    class Whole(Ending):
        def __next__(self):
            if self.next >= self.count:
                raise StopIteration
            return super().__next__()

    ahead = resumable_batches.ReadAhead(Whole(2), 4)
    ahead.begin()
    assert [int(batch[0]) for batch in ahead] == [0, 1]
    assert ahead.end is None
    ahead.set_state({"next": 1})
    assert [int(batch[0]) for batch in ahead] == [1]
