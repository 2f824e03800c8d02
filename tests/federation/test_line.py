"""A line by itself, in virtual time: how long it waits for what comes slowly."""

import asyncio
import socket

from nebula_jax.federation import line, messages

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
    made = line.Line(
        reader, writer, is_dialer=False, beat=dict, receive=lambda *_: None
    )
    return made, reader, there


def test_bytes_of_a_long_message_are_no_silence_however_slowly_they_come():
    async def wait():
        clock = [asyncio.get_running_loop().time()]
        made, reader, there = await begun(clock)
        stream = made.accept(1)
        running = asyncio.create_task(made.run())
        message = messages.encode(messages.DATA, 1, bytes(messages.CHUNK_BYTES))
        for start in range(0, len(message), PIECE_BYTES):
            clock[0] += 0.9 * line.SILENCE_SECONDS
            reader.feed_data(message[start : start + PIECE_BYTES])
            await settle()
            assert not running.done(), running
        assert await stream.receive() == bytes(messages.CHUNK_BYTES)
        clock[0] += 1.1 * line.SILENCE_SECONDS
        assert await running == "nothing came for 10 s"
        there.close()

    asyncio.run(wait())


def test_a_line_that_is_closed_within_a_message_ends():
    async def wait():
        made, reader, there = await begun([asyncio.get_running_loop().time()])
        made.accept(1)
        reader.feed_data(messages.encode(messages.DATA, 1, bytes(100))[:-1])
        reader.feed_eof()
        assert await made.run() == "the other switch closed the line"
        there.close()

    asyncio.run(wait())
