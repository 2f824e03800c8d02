"""The relay: the rate of its line, and the end of its connections."""

import contextlib
import socket
import threading
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


def test_each_direction_has_the_whole_rate_while_both_are_full():
    found = {}

    def receive(sock, begin):
        size = SENT
        while size and (data := sock.recv(size)):
            size -= len(data)
        found[sock] = time.monotonic() - begin

    def seconds_of(pairs):
        begin = time.monotonic()
        threads = [
            threading.Thread(target=target, args=args)
            for source, sink in pairs
            for target, args in (
                (receive, (sink, begin)),
                (source.sendall, (bytes(SENT),)),
            )
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return max(found.values())

    with ends(RATE) as (here, there):
        one_way = seconds_of([(here, there)])
        found.clear()
        both_ways = seconds_of([(here, there), (there, here)])
    assert one_way > 0.8 * SENT / RATE  # the last piece is not waited for
    assert both_ways < 1.6 * one_way  # with one rate for both it would be twice


def test_an_end_that_closes_closes_the_other():
    with ends(RATE) as (here, there):
        here.close()
        assert there.recv(1) == b""
