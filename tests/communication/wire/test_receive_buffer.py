import numpy as np
import pytest

from nebula_jax.communication.wire import receive_buffer


@pytest.mark.parametrize("read", [1, 7, 4096])
def test_parts_and_large_buffers_come_out_of_a_stream_as_they_went_in(read):
    data = np.random.RandomState(0).bytes(20_000)
    parts = receive_buffer.ReceiveBuffer()

    def parse():
        head = yield from parts.exact(10)
        return head, (yield from parts.fill([5, 0, 19_985]))

    parsing, given, result = parse(), 0, None
    while result is None:
        try:
            next(parsing)
        except StopIteration as done:
            result = done.value
        view = parts.get_buffer()
        count = min(len(view), read, len(data) - given)
        view[:count] = data[given : given + count]
        parts.receive(count)
        given += count
    head, buffers = result
    assert not parts.has_holes
    assert head + b"".join(map(bytes, buffers)) == data
    assert buffers[2].ctypes.data % receive_buffer.ALIGNMENT == 0


def test_the_stage_makes_room_for_what_comes_in_pieces():
    parts = receive_buffer.ReceiveBuffer()
    size = receive_buffer.STAGE_BYTES - 1

    def give(count):
        parts.get_buffer()[:count] = bytes(count)
        parts.receive(count)

    give(size)
    assert next(_result(parts.exact(10))) == bytes(10)
    waiting = parts.exact(size)
    next(waiting)
    assert len(parts.get_buffer()) == 11
    give(10)
    assert next(_result(waiting)) == bytes(size)


def _result(generator):
    """Yields what a generator returns, which must not wait for more bytes."""
    try:
        next(generator)
    except StopIteration as done:
        yield done.value
