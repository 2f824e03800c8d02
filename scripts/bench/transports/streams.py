"""asyncio's streams, with TLS as well.

The loop runs while a call is under way. That costs a round trip some tens of
microseconds, which a program that lives in the loop would not pay.
"""

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np

from nebula_jax.security import tls
from scripts.bench import transports

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Streams:
    def __init__(self, runner: asyncio.Runner, streams: Streams):
        self._run = runner.get_loop().run_until_complete
        self._reader, self._writer = streams

    def send(self, buffer: np.ndarray) -> None:
        self._writer.write(memoryview(buffer))
        self._run(self._writer.drain())

    def receive(self, size: int) -> bytes:
        return self._run(self._reader.readexactly(size))


@contextlib.contextmanager
def listen(meeting: transports.Meeting) -> Iterator[_Streams]:
    """Binds and waits; see `transports`."""
    credentials = meeting.credentials
    context = tls.server_contexts(credentials)() if credentials else None

    async def accept() -> Streams:
        met = asyncio.get_running_loop().create_future()
        host, port = meeting.address
        server = await asyncio.start_server(
            lambda *streams: met.set_result(streams), host, port, ssl=context
        )
        streams = await met
        server.close()
        return streams

    with asyncio.Runner() as runner:
        yield _Streams(runner, runner.run(accept()))


@contextlib.contextmanager
def connect(meeting: transports.Meeting) -> Iterator[_Streams]:
    """Connects; see `transports`."""
    credentials = meeting.credentials
    options = {}
    if credentials:
        options = {
            "ssl": tls.client_contexts(credentials)(),
            "server_hostname": "discriminator",
        }

    sock = transports.dial(meeting.address)
    with asyncio.Runner() as runner:
        streams = runner.run(asyncio.open_connection(sock=sock, **options))
        yield _Streams(runner, streams)
