import numpy as np
import pytest

from nebula_jax.communication.wire import receive_buffer


@pytest.mark.parametrize("read", [1, 7, 4096])
def test_parts_and_large_buffers_come_out_of_a_stream_as_they_went_in(read):
    data = np.random.RandomState(0).bytes(20_000)
    parts = receive_buffer.ReceiveBuffer()

    def parse():
        while (head := parts.take(10)) is None:
            yield
        buffers = parts.place([5, 0, 19_985])
        while parts.has_holes:
            yield
        return head, buffers

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
    taken = receive_buffer.aligned_empty(19_985).base.nbytes
    assert taken <= 19_985 + receive_buffer.ALIGNMENT


def test_the_stage_makes_room_for_what_comes_in_pieces():
    parts = receive_buffer.ReceiveBuffer()
    size = receive_buffer.STAGE_BYTES - 1

    def give(count):
        parts.get_buffer()[:count] = bytes(count)
        parts.receive(count)

    give(size)
    assert parts.take(10) == bytes(10)
    assert parts.take(size) is None
    assert len(parts.get_buffer()) == 11
    give(10)
    assert parts.take(size) == bytes(size)
