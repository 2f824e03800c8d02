"""A stream as one switch carries it: between a trainer here and the other end.

The other end is a trainer behind another switch, or one of this lab
(`line.local_pair`). Every frame is checked against the policy and the account's quota
before its first byte is passed on, and counted, in both directions.
"""

import asyncio
import contextlib
import dataclasses
from typing import NamedTuple

from nebula_jax import errors
from nebula_jax.federation import line, meter

SMALL_BYTES = 16 << 10  # a trainer that sends less at a time trickles:
GATHER_SECONDS = 0.002  # what comes meanwhile goes on as one message
LEFT_SECONDS = 5.0  # for a trainer to take what came before the stream's end

Trainer = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # connection to one here


class About(NamedTuple):
    """A stream, as both switches have it in their logs."""

    name: str  # drawn by the switch of the connector
    job: str
    account: str  # the connector's, such as `ana@lab-s`
    connector: str  # the cluster that dials
    listener: str  # the cluster that it dials
    lab: str  # the other lab


@dataclasses.dataclass
class Carried:
    """The frames that one stream has carried so far, whether or not it has ended."""

    sent: meter.Meter  # from the trainer here
    received: meter.Meter
    refusal: errors.NebulaError | None = None  # why this switch ended it, if it did


async def carry(
    trainer: Trainer,
    end: line.Stream,
    carried: Carried,
) -> None:
    """Carries a stream to its end; counts into `carried`, also if it is cancelled."""
    reader, writer = trainer

    async def outward() -> None:
        while data := await reader.read(line.CHUNK_BYTES):
            carried.sent.feed(data)
            await end.send(data)
            if len(data) < SMALL_BYTES:
                await asyncio.sleep(GATHER_SECONDS)

    async def inward() -> None:
        while data := await end.receive():
            carried.received.feed(data)
            writer.write(data)
            await writer.drain()
            end.passed_on(len(data))

    tasks = [asyncio.create_task(each) for each in (outward(), inward())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done and tasks[1] not in done:
            end.close()
        try:
            next(iter(done)).result()
        except (OSError, line.LineEnded):
            pass  # a trainer or the other switch has gone
        except errors.NebulaError as error:
            carried.refusal = error
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        end.close(at_once=carried.refusal is not None)
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    """Closes a connection to a trainer, once it has taken what is on its way."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.close()
        async with asyncio.timeout(LEFT_SECONDS):
            await writer.wait_closed()
    writer.transport.abort()
