import contextlib
import socket

import pytest

from nebula_jax.communication import wan
from nebula_jax.communication.wire import socket_io, wakeups


@pytest.fixture
def pair():
    """A SocketIO without unread bytes, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    wakes = wakeups.Waker()
    io = socket_io.SocketIO(ours, wan.Shaper(wan.UNSHAPED), wakes)
    io.has_unread = False
    with theirs, contextlib.closing(wakes):
        yield io, theirs
    io.close()


def test_bytes_and_the_end_are_readable_only_where_reading_is_allowed(pair):
    io, theirs = pair
    io.watch(reads=True)
    assert not io.wait(0.0)
    theirs.send(b"x")
    assert io.wait(5.0)
    io.watch(reads=False)
    assert not io.wait(0.0)
    theirs.close()
    io.is_blocked = True  # there is something to write, so the end is polled for
    io.watch(reads=False)
    assert not io.wait(5.0)
    io.watch(reads=True)
    assert io.wait(5.0)


def test_a_wait_ends_when_somebody_wakes(pair):
    io, _ = pair
    io.watch(reads=False)
    io._waker.wake()
    assert not io.wait(60.0)


def test_the_last_frame_is_read_before_the_end_though_bytes_are_unread_here(pair):
    io, theirs = pair
    theirs.send(bytes(1 << 17))  # more than is read at a time
    theirs.shutdown(socket.SHUT_WR)
    io.socket.send(b"last")
    io.close(linger=True)
    assert theirs.recv(100) == b"last"
    assert theirs.recv(100) == b""
