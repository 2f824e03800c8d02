"""The relay: the rate of its line, and the end of its connections."""

import contextlib
import socket
import time

from scripts.bench import relay

RATE, SENT = 1e6, 1_000_000  # bytes a second, bytes


@contextlib.contextmanager
def ends(rate):
    """Yields both ends of a connection over a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        line = relay.Relay(listening.getsockname()[:2], rate)
        here = socket.create_connection(line.address)
        there, _ = listening.accept()
        with here, there:
            for each in (here, there):
                each.settimeout(10.0)
            try:
                yield here, there
            finally:
                line.close()


def test_each_direction_has_the_whole_rate_while_both_are_full(pool):
    def receive(sock):
        size = SENT
        while size and (data := sock.recv(size)):
            size -= len(data)

    with ends(RATE) as both:
        begin = time.monotonic()
        received = [pool.submit(receive, each) for each in both]
        sent = [pool.submit(each.sendall, bytes(SENT)) for each in both]
        for each in received + sent:
            each.result(30)
        seconds = time.monotonic() - begin
    assert seconds > 0.8 * SENT / RATE  # the last piece is not waited for
    assert seconds < 1.6 * SENT / RATE  # with one rate for both it would be twice


def test_an_end_that_closes_closes_the_other():
    with ends(RATE) as (here, there):
        here.close()
        assert there.recv(1) == b""
