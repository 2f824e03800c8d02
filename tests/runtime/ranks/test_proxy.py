"""A line that does not break when the service at its other end goes."""

import contextlib
import functools
import os
import socket
import tempfile

import children
import pytest

from nebula_jax.runtime.ranks import proxy

SECONDS = 10.0


def opened(server):
    """Opens a line to a server; returns where to connect."""
    host, port = server.getsockname()[:2]
    connect = functools.partial(socket.create_connection, (host, port), SECONDS)
    here, there = proxy.open_to(connect).split(":")
    return here, int(there)


@pytest.fixture
def ends():
    """A connection on a line, and its service's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        with socket.create_connection(opened(server), SECONDS) as served:
            service, _ = server.accept()
            service.settimeout(SECONDS)
            with service:
                yield served, service


def received(sock, count):
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
        address, where = server.getsockname(), opened(server)
    with socket.create_connection(where, SECONDS) as served:
        assert served.recv(1) == b""
    with socket.create_server(address) as server:
        server.settimeout(SECONDS)
        with socket.create_connection(where, SECONDS) as served:
            served.sendall(b"x")
            service, _ = server.accept()
            with service:
                assert received(service, 1) == b"x"


def test_another_process_of_this_host_is_not_served():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        where = opened(server)
        code = (
            f"import socket; s = socket.create_connection({where!r}, {SECONDS})\n"
            "s.sendall(b'PRI * HTTP/2.0'); print(s.recv(1))"
        )
        stranger = children.python("-c", code, timeout=60)
        assert stranger.stdout == "b''\n" or "ConnectionReset" in stranger.stderr
        with contextlib.ExitStack() as stack:  # the first to come is this process
            served = stack.enter_context(socket.create_connection(where, SECONDS))
            service = stack.enter_context(server.accept()[0])
            service.sendall(b"for you alone")
            assert received(served, 13) == b"for you alone"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_of_either_kind_is_this_processs_own(family):
    """As of JAX, which connects to 127.0.0.1 by a socket for both."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        try:
            sock = stack.enter_context(socket.socket(family))
        except OSError:
            pytest.skip("this host has no IPv6")
        host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
        sock.connect((host, server.getsockname()[1]))
        accepted = stack.enter_context(server.accept()[0])
        stack.enter_context(tempfile.TemporaryFile())  # what is no socket
        before = len(os.listdir("/dev/fd"))
        assert proxy._is_own(accepted)
        sock.close()
        assert not proxy._is_own(accepted)
        assert len(os.listdir("/dev/fd")) == before - 1  # no copy stays open
