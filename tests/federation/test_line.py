"""A line by itself: its messages, and how long it waits, in virtual time."""

import asyncio
import contextlib
import socket

import pytest

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import line
from nebula_jax.security.tls import between_labs

PIECE_BYTES = 16 << 10  # of a TLS record, the least that can be read


async def settle():
    """Lets all tasks go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(clock):
    """A line whose time is the clock's, and the reader that feeds it."""
    asyncio.get_running_loop().time = lambda: clock[0]
    here, there = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=here)
    reader = asyncio.StreamReader()
    peer = between_labs.Peer("lab-t", "switch", 1, None, None)
    connection = line.Connection(reader, writer, peer)
    made = line.Line(connection, is_dialer=False, beat=dict, receive=lambda *_: None)
    return made, reader, there


def test_bytes_of_a_long_message_are_no_silence_however_slowly_they_come():
    async def wait():
        clock = [asyncio.get_running_loop().time()]
        made, reader, there = await begun(clock)
        stream = made.accept(1)
        running = asyncio.create_task(made.run())
        message = line.encode(line.DATA, 1, bytes(line.CHUNK_BYTES))
        for start in range(0, len(message), PIECE_BYTES):
            clock[0] += 0.9 * line.SILENCE_SECONDS
            reader.feed_data(message[start : start + PIECE_BYTES])
            await settle()
            assert not running.done(), running
        assert await stream.receive() == bytes(line.CHUNK_BYTES)
        clock[0] += 1.1 * line.SILENCE_SECONDS
        assert await running == "nothing came for 10 s"
        there.close()

    asyncio.run(wait())


def test_a_stream_that_overruns_its_window_ends_the_line_before_it_fills_memory():
    async def wait():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        made.accept(1)
        running = asyncio.create_task(made.run())
        message = line.encode(line.DATA, 1, bytes(line.CHUNK_BYTES))
        for _ in range(line.WINDOW_BYTES // line.CHUNK_BYTES + 1):
            assert not running.done()
            reader.feed_data(message)
            await settle()
        reader.feed_data(message)
        await settle()
        assert running.done()
        assert "stream 1 overran its window" in running.result()
        there.close()

    asyncio.run(wait())


def test_new_streams_of_the_other_side_alone_are_taken_and_not_too_many(monkeypatch):
    monkeypatch.setattr(line, "MOST_STREAMS", 2)

    async def announce():
        made, _, there = await begun([asyncio.get_running_loop().time()])
        made.accept(1)
        for number in (1, 2, 0, -1):
            with pytest.raises(json_lines.Malformed, match=f"stream {number}"):
                made.accept(number)
        made.accept(3)
        for add in (lambda: made.accept(5), made.open):
            with pytest.raises(line.Full, match="lab-t has 2 streams"):
                add()
        there.close()

    asyncio.run(announce())


def test_streams_that_are_filled_one_after_the_other_have_a_bound(monkeypatch):
    """Whose trainers take nothing: their bytes stay when the peer has closed them."""
    monkeypatch.setattr(line, "MOST_STREAMS", 4)
    monkeypatch.setattr(line, "WINDOW_BYTES", 2 * line.CHUNK_BYTES)
    most = line.MOST_STREAMS * (line.WINDOW_BYTES + line.CHUNK_BYTES)

    async def fill():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        running, streams = asyncio.create_task(made.run()), []
        for number in range(1, 41, 2):
            with contextlib.suppress(errors.NebulaError):
                streams.append(made.accept(number))
            for _ in range(3):
                message = line.encode(line.DATA, number, bytes(line.CHUNK_BYTES))
                reader.feed_data(message)
                await settle()
            reader.feed_data(line.encode(line.CLOSE, number))
            await settle()
            assert not running.done()
        assert sum(each._here for each in streams) == most
        assert await streams[0].receive() == bytes(line.CHUNK_BYTES)
        with pytest.raises(line.Full):
            made.accept(41)
        streams[0].close()
        made.accept(41)
        there.close()

    asyncio.run(fill())


def test_what_closed_streams_have_to_send_has_a_bound(monkeypatch):
    monkeypatch.setattr(line, "MOST_STREAMS", 4)

    async def fill():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        for _ in range(4):
            stream = made.open()
            made.share(stream, "ana", 1.0)
            await stream.send(bytes(line.CHUNK_BYTES))
            stream.close()
        with pytest.raises(line.Full):
            made.open()
        reader.feed_data(line.encode(line.CLOSE, stream.number))
        running = asyncio.create_task(made.run())
        await settle()
        made.open()
        running.cancel()
        there.close()

    asyncio.run(fill())


def test_small_pieces_take_no_more_memory_than_their_bytes():
    async def feed():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        stream, running = made.accept(1), asyncio.create_task(made.run())
        reader.feed_data(500 * line.encode(line.DATA, 1, b"ab"))
        reader.feed_eof()
        await running
        assert await stream.receive() == 500 * b"ab"
        assert await stream.receive() == b""
        there.close()

    asyncio.run(feed())


def test_a_peer_that_reads_nothing_fills_no_memory():
    async def wait():
        made, _, there = await begun([asyncio.get_running_loop().time()])
        sent = 0
        while not made.is_closed:
            made.send(op="list", pem="x" * (64 << 10))
            sent += 64 << 10
            assert sent < 2 * line.MOST_URGENT
        there.close()

    asyncio.run(wait())


def test_credit_is_for_what_has_left():
    """Else one that reads nothing would have the other side queue without end."""

    async def wait():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        stream = made.accept(1)
        made.share(stream, "ana", 1.0)
        running = asyncio.create_task(made.run())
        credit = line.encode(line.CREDIT, 1, line._CREDIT.pack(line.CHUNK_BYTES))
        await stream.send(bytes(line.CHUNK_BYTES))
        await settle()
        reader.feed_data(credit)
        await settle()
        assert not running.done()
        for _ in range(line.WINDOW_BYTES // line.CHUNK_BYTES):  # more than there reads
            await stream.send(bytes(line.CHUNK_BYTES))
        for _ in range(line.WINDOW_BYTES // line.CHUNK_BYTES):
            reader.feed_data(credit)
        await settle()
        assert "stream 1 was given more than it sent" in running.result()
        there.close()

    asyncio.run(wait())


def test_a_line_that_is_closed_within_a_message_ends():
    async def wait():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        made.accept(1)
        reader.feed_data(line.encode(line.DATA, 1, bytes(100))[:-1])
        reader.feed_eof()
        assert await made.run() == "the other switch closed the line"
        there.close()

    asyncio.run(wait())


def test_messages_are_literal_bytes():
    assert line.encode(line.DATA, 5, b"abc") == b"\x02\0\0\x03\0\0\0\x05abc"
    assert line.read_head(line.encode(line.CLOSE, 9)) == (line.CLOSE, 9, 0)
    assert line.read_credit(b"\0\0\x01\0") == 256
    with pytest.raises(json_lines.Malformed):
        line.read_credit(b"\0")


@pytest.mark.parametrize(
    "head",
    [
        b"\0" * 8,
        b"\x05" + bytes(7),
        b"\x02\xff\xff\xff" + bytes(4),
        b"\x03\0\0\x05" + bytes(4),
        b"\x04\0\0\x01" + bytes(4),
    ],
)
def test_other_kinds_and_longer_ones_are_refused(head):
    with pytest.raises(json_lines.Malformed):
        line.read_head(head)
