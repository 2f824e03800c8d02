"""The entrance of a switch: what connects from outside, until it is a line of a lab.

Anybody can connect. So there is a bound on how many do at a time, and on how long each
has to show a certificate, or to request one.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

from nebula_jax import errors
from nebula_jax.communication import pending_connections
from nebula_jax.communication.wire import greeting
from nebula_jax.federation import joining, outer, refusals, state, streams
from nebula_jax.security.tls import peer_tls

BACKLOG = 128
MOST_NEWCOMERS = 128  # each may cost 256 KiB of TLS
NEWCOMER_SECONDS = 15.0  # for handshake, request and end of one
PAUSE = 0.1  # seconds, where the system has no more sockets


class Entrance:
    """The newcomers of one switch."""

    def __init__(
        self,
        made: state.State,
        refused: refusals.Refusals,
        serve: Callable[[outer.Connection], Awaitable[None]],
    ) -> None:
        """Starts without any.

        Args:
          made: the switch's state.
          refused: takes who does not come in.
          serve: called with each connection of a lab; returns at its end.
        """
        self._state, self._refusals, self._serve = made, refused, serve
        most = min(MOST_NEWCOMERS, pending_connections.most())
        self._newcomers = pending_connections.Pool(most)
        self._groups: dict[str, str] = {}  # lab -> group of the address it came from

    async def accept(self, listening: socket.socket) -> None:
        """Accepts connections until it is cancelled.

        Args:
          listening: bound to the outside address.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        listening.listen(BACKLOG)
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:  # it went again, or the system has no more
                await asyncio.sleep(PAUSE)
                continue
            if self._newcomers.is_full:
                self.make_room()
            sock.setblocking(False)
            deadline = loop.time() + NEWCOMER_SECONDS
            connected = greeting.Connected(sock)
            newcomer = pending_connections.Pending(connected, address[0], deadline)
            self._newcomers.add(newcomer)
            self._state.begin(self._meet(newcomer))

    def make_room(self) -> None:
        """Ends a connection that is no line yet, so that another one can come."""
        newcomer = self._newcomers.to_go(self._groups.values())
        if newcomer is not None:
            self._newcomers.remove(newcomer)
            text, now = "too many others had come", time.monotonic()
            self._refusals.add(newcomer.host, "crowded_out", text, now)
            with contextlib.suppress(OSError):  # what waits for it finds its end
                newcomer.sock.shutdown(socket.SHUT_RDWR)

    async def _meet(self, newcomer: pending_connections.Pending) -> None:
        """Passes on the connection of a lab, or serves who has no certificate."""
        try:
            async with asyncio.timeout_at(newcomer.deadline):
                connection = await outer.accept(self._state.folder, newcomer.sock)
                if not connection.lab:
                    await self._join(connection, newcomer)
                    return
        except (errors.NebulaError, OSError, EOFError) as error:
            self._refused(newcomer, error)
            return
        finally:
            has_place = newcomer in self._newcomers
            if has_place:
                self._newcomers.remove(newcomer)
        if not has_place:
            connection.writer.transport.abort()
            return
        self._groups[connection.lab] = newcomer.group
        await self._serve(connection)

    async def _join(
        self,
        connection: outer.Connection,
        newcomer: pending_connections.Pending,
    ) -> None:
        made = self._state
        try:
            if made.issuer is None:
                raise peer_tls.PeerRefused("none", "the authority is at another lab")
            done = await joining.serve(connection, made.issuer)
            if done["op"] == "join":
                made.log(f"{done['lab']} has joined the federation")
                about = {"event": "joined", "host": newcomer.host}
                made.record("federation", done["lab"], **about)
        except (errors.NebulaError, OSError, ValueError) as error:
            self._refused(newcomer, error)
        finally:
            await streams.close(connection.writer)

    def _refused(
        self, newcomer: pending_connections.Pending, error: BaseException
    ) -> None:
        if newcomer in self._newcomers:  # else there is an entry, with the reason
            self._refusals.add_error(newcomer.host, error, time.monotonic())
