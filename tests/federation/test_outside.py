"""Connections to the outside: when an attempt to dial ends."""

import asyncio
import contextlib
import socket

import pytest
import two_labs

from nebula_jax.federation import outside


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
                await outside.dial(folder, address)

    with pytest.raises(TimeoutError, match="no answer within"):
        asyncio.run(dial())


def test_an_attempt_knocks_as_often_as_a_trainers_own():
    """SYNs leave after 0, 1 and 3 s; the next one would after 7."""
    assert 3.0 < outside.CONNECT_SECONDS < 7.0
