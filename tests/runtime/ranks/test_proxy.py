"""A line that does not break when the service at its other end goes."""

import socket

import pytest

from nebula_jax.runtime.ranks import proxy

SECONDS = 10.0


@pytest.fixture
def ends():
    """A connection on a line, and its service's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        host, port = server.getsockname()
        here, there = proxy.open_to(f"{host}:{port}").split(":")
        with socket.create_connection((here, int(there)), SECONDS) as served:
            service, _ = server.accept()
            service.settimeout(SECONDS)
            with service:
                yield served, service


def received(sock, count):
    """Returns the next `count` bytes."""
    with sock.makefile("rb") as stream:
        return stream.read(count)


def test_bytes_pass_both_ways(ends):
    served, service = ends
    for one, other in ((served, service), (service, served)):
        sent = bytes(range(256)) * 1000
        one.sendall(sent)
        assert received(other, len(sent)) == sent


def test_it_stays_when_the_service_goes(ends):
    served, service = ends
    service.sendall(b"last")
    service.close()
    assert received(served, 4) == b"last"
    served.settimeout(0.2)
    for _ in range(3):
        served.sendall(b"is anybody there?")
        with pytest.raises(TimeoutError):
            served.recv(1)


def test_the_service_sees_that_who_is_served_has_gone(ends):
    served, service = ends
    served.close()
    assert service.recv(1) == b""


def test_a_service_that_is_not_there_yet_is_found_later():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    here, there = proxy.open_to(f"{host}:{port}").split(":")
    with socket.create_connection((here, int(there)), SECONDS) as served:
        assert served.recv(1) == b""
    with socket.create_server((host, port)) as server:
        server.settimeout(SECONDS)
        with socket.create_connection((here, int(there)), SECONDS) as served:
            served.sendall(b"x")
            service, _ = server.accept()
            with service:
                assert received(service, 1) == b"x"
