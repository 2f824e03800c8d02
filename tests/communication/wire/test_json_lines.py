"""JSON on a line: what is no object, or has no end, is refused."""

import asyncio
import socket

import pytest

from nebula_jax.communication.wire import json_lines


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_a_message_is_an_object(data):
    with pytest.raises(json_lines.Malformed):
        json_lines.decode(data)


@pytest.mark.parametrize("value", [None, "1", 1.0, True, []])
def test_a_field_has_its_type(value):
    with pytest.raises(json_lines.Malformed):
        json_lines.field({"n": value}, "n", int)
    assert json_lines.field({"n": 1}, "n", int) == 1


def test_a_reader_takes_its_line_and_no_byte_of_the_stream_after_it():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(json_lines.encode({"lab": "lab-t"}) + b"stream")
        assert json_lines.read(here) == {"lab": "lab-t"}
        assert here.recv(99) == b"stream"
        there.close()
        with pytest.raises(EOFError):
            json_lines.read(here)


def test_a_line_without_an_end_is_refused_at_the_bound(monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_BYTES", 1000)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b" " * 2000)
        with pytest.raises(json_lines.Malformed):
            json_lines.read(here)

    async def read():
        reader = asyncio.StreamReader(limit=1000)
        reader.feed_data(b" " * 2000)
        await json_lines.read_from(reader)

    with pytest.raises(json_lines.Malformed):
        asyncio.run(read())
