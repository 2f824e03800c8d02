import socket
import threading

import pytest

from nebula_jax.communication.wire import frames, ledger


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    yield one, other
    one.close()
    other.close()


def cross(one, other, count):
    thread = threading.Thread(target=one.sendall, args=(b"x" * count,))
    thread.start()
    left = count
    while left:
        left -= len(other.recv(1 << 16))
    thread.join()


def test_what_crossed_is_what_the_kernel_counts(pair):
    cross(*pair, 1_000_000)
    sent, _ = ledger.counted(pair[0])
    _, received = ledger.counted(pair[1])
    assert sent == 1_000_000
    assert received in (1_000_000, 1_000_001)  # Linux adds a number of its own


def test_the_kernel_measures_a_round_trip(pair):
    cross(*pair, 1000)
    assert 0 < ledger.round_trip(pair[0]) < 1.0
    one, other = socket.socketpair()
    with one, other:
        assert ledger.round_trip(one) == 0.0


@pytest.mark.parametrize(
    ("count", "added"), [(0, 0), (1, 22), (16384, 22), (16385, 44)]
)
def test_tls_adds_22_bytes_a_record(count, added):
    assert ledger.tls_bytes(count) == added


def test_several_connections_add_up(pair):
    book = ledger.Ledger()
    traffic = ledger.Traffic(book)
    traffic.opened(pair[0])
    book.count(ledger.SENT, frames.End(), 1000)
    cross(*pair, 1000)
    traffic.closed(pair[0], 0)
    assert traffic.report(None, 0) == {
        "frames": 1000,
        "tls": 0,
        "kernel_sent": 1000,
        "kernel_received": traffic.report(None, 0)["kernel_received"],
    }
    cross(*pair, 500)  # a handshake, and a first frame of 400
    book.count(ledger.SENT, frames.End(), 400)
    traffic = ledger.Traffic(book)
    traffic.opened(pair[0])
    assert traffic.report(pair[0], 44)["tls"] == 1500 - 1400 + 44
