"""Connections to the outside: when an attempt to dial ends, and which are recorded."""

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


class State:
    """A switch's, of which refusals need the log alone."""

    def __init__(self):
        self.entries = []

    def log(self, line):
        assert line.startswith("refused a connection from h: ")

    def record(self, kind, host, reason, others=0):
        self.entries.append((kind, host, reason, others))


def test_a_few_have_an_entry_each_and_many_have_one_a_minute():
    switch = State()
    made = outside.Refusals(switch)
    for number in range(outside.REFUSAL_BURST):
        made.add("h", "expired", "text", 100.0 + number / 1000)
    entry = ("refusal", "h", "expired", 0)
    assert switch.entries == [entry] * outside.REFUSAL_BURST
    for number in range(5000):
        made.add("h", "none", "text", 101.0 + 0.06 * number)
    later = switch.entries[outside.REFUSAL_BURST :]
    assert 4 <= len(later) <= 6
    assert sum(1 + others for *_, others in later) >= 4000


def test_after_a_pause_each_has_an_entry_again():
    switch = State()
    made = outside.Refusals(switch)
    for now in range(1000):
        made.add("h", "none", "text", 0.01 * now)
    count = len(switch.entries)
    made.add("h", "none", "text", 1000.0)
    made.add("h", "none", "text", 1000.0)
    assert len(switch.entries) == count + 2
