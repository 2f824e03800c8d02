"""Connections to the outside: when an attempt to dial ends."""

import asyncio
import contextlib
import socket
import types

import pytest
import two_labs
from cryptography.hazmat.primitives import serialization

from nebula_jax.federation import line, outside
from nebula_jax.security.membership import member
from nebula_jax.security.tls import between_labs, credentials


@contextlib.contextmanager
def swallowing():
    """Yields an address that answers nothing: its queue is full, and packets vanish."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listening.getsockname())
        yield listening.getsockname()


def test_an_attempt_to_dial_ends_before_tcp_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "CONNECT_SECONDS", 0.2, raising=False)
    folder = two_labs.found(tmp_path)

    async def dial():
        with swallowing() as address:
            async with asyncio.timeout(20):
                await outside.dial(folder, "lab-t", address)

    with pytest.raises(TimeoutError, match="no answer within"):
        asyncio.run(dial())


def test_another_member_at_the_address_of_a_lab_is_refused_and_named(labs):
    dialed = outside.dial(labs.t.folder, "lab-u", labs.s.address)
    with pytest.raises(credentials.CredentialsError, match="this is lab-s, not lab-u"):
        asyncio.run(dialed)


def test_an_attempt_knocks_as_often_as_a_trainers_own():
    """SYNs leave after 0, 1 and 3 s; the next one would after 7."""
    assert 3.0 < outside.CONNECT_SECONDS < 7.0


def ended(folder):
    """The writer of a TLS connection that the other side has closed meanwhile."""
    found = member.own_certificate(folder, "switch")
    der = found.public_bytes(serialization.Encoding.DER)
    tls = types.SimpleNamespace(getpeercert=lambda binary: der)
    transport = types.SimpleNamespace(
        abort=lambda: None, set_write_buffer_limits=lambda *_: None
    )
    about = {"ssl_object": tls}  # asyncio has no socket of it any more
    return types.SimpleNamespace(transport=transport, get_extra_info=about.get)


def test_a_connection_that_ends_while_it_is_checked_ends_no_switch(tmp_path):
    """Neither task that would meet another error may fail: the switch ends with it."""
    folder = two_labs.found(tmp_path)

    async def check():
        with pytest.raises(ConnectionResetError, match="ended at once"):
            await outside._checked(folder, None, ended(folder))
        peer = between_labs.Peer("lab-t", "switch", 1, None, None)
        connection = line.Connection(None, ended(folder), peer)
        line.Line(connection, is_dialer=True, beat=dict, receive=print)

    asyncio.run(check())
