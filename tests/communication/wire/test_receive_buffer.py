import numpy as np
import pytest

from nebula_jax.communication.wire import receive_buffer


@pytest.mark.parametrize("read", [1, 7, 4096])
def test_parts_and_large_buffers_come_out_of_a_stream_as_they_went_in(read):
    data = np.random.RandomState(0).bytes(20_000)
    parts, given, buffers = receive_buffer.Assembly(), 0, None
    while given < len(data):
        if buffers is None and parts.peek(10) is not None:
            head = bytes(parts.peek(10))
            parts.drop(10)
            buffers = parts.take([5, 19_985])
        view = parts.get_buffer()
        count = min(len(view), read, len(data) - given)
        view[:count] = data[given : given + count]
        parts.filled(count)
        given += count
    assert not parts.has_holes
    assert head + b"".join(map(bytes, buffers)) == data
    assert buffers[1].ctypes.data % receive_buffer.ALIGNMENT == 0
