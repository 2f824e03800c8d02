"""Connections of a switch to the outside: dialed, accepted, refused.

Each has a TLS context of its own: one that served for several would resume sessions,
and let a revoked lab back in. Anybody can connect, so there is a bound on how many
connections are pending (no line of a lab yet), on how long each has to show a
certificate or to request one, and on the entries that refusals make in the audit log.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import endpoints, pending_connections
from nebula_jax.communication.wire import greeting, json_lines
from nebula_jax.federation import joining, line, state, streams
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import between_labs, credentials

CONNECT_SECONDS = 5.0  # TCP's own pauses grow: it would knock again after a minute
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 1.0
LIMIT_BYTES = 1 << 17  # of a reader's buffer
BACKLOG = 128
MOST_PENDING = 128  # each may cost 256 KiB of TLS
PENDING_SECONDS = 15.0  # for handshake, request and end of one
PAUSE = 0.1  # seconds, where the system has no more sockets
STRANGERS = ""  # who together cause refusals, for the log


async def accepted(
    listening: socket.socket,
) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Yields each connection that is made to a socket, with its address."""
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    listening.listen(BACKLOG)
    while True:
        try:
            found = await loop.sock_accept(listening)
        except OSError:  # it went again, or the system has no more
            await asyncio.sleep(PAUSE)
            continue
        yield found


async def accept(folder: site_folder.Folder, sock: socket.socket) -> line.Connection:
    """Shakes hands with whoever has connected; closes `sock` if this raises.

    Raises site_folder.Refusal, with the reason, if the connection must not be used, and
    OSError, such as ssl.SSLError, if there was no handshake.
    """
    loop = asyncio.get_running_loop()
    try:
        await _client_hello(sock)
        made = between_labs.server_context
        context = await asyncio.to_thread(made, folder, allows_joining=True)
        reader = asyncio.StreamReader(LIMIT_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
    except BaseException:
        sock.close()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    return await _checked(folder, reader, writer)


async def _client_hello(sock: socket.socket) -> None:
    """Waits for a first record of TLS: until then, nobody costs more than this."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    steps = greeting.client_hello(sock)
    while True:
        try:
            next(steps)
        except StopIteration:
            return
        except greeting.NoTls as error:
            raise credentials.CredentialsError("plaintext", str(error)) from None
        loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(sock)
            ready.clear()


async def dial(
    folder: site_folder.Folder, lab: str, address: tuple[str, int]
) -> line.Connection:
    """Connects to the switch of a lab at an address.

    Raises site_folder.Refusal, with the reason, if it must not be used, or is another
    lab's; OSError if nobody answers in time, or there was no handshake.
    """
    made = between_labs.client_context
    context = await asyncio.to_thread(made, folder, shows_expired=True)
    context.check_hostname = False  # `_checked` names who answers instead of the lab
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                *address,
                limit=LIMIT_BYTES,
                ssl=context,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_SECONDS:g} s") from None
    return await _checked(folder, reader, writer, lab)


async def _checked(
    folder: site_folder.Folder,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    lab: str = "",
) -> line.Connection:
    """Checks whose connection it is; closes it if it must not be used.

    `lab` was dialed; it is empty if somebody has, perhaps without a certificate.
    """
    try:
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        der = tls.getpeercert(True)
        if der is None and not lab:
            return line.Connection(reader, writer, None)
        if (own := writer.get_extra_info("socket")) is None:
            raise ConnectionResetError("the connection has ended at once")
        endpoints.keep_alive(own)
        peer = await asyncio.to_thread(between_labs.check_peer, der, folder)
        if peer.role != "switch" or lab not in ("", peer.lab):
            name = site_folder.dns_name(peer.lab, peer.role)
            text = f"this is {name}, not {lab or 'a switch'}"
            raise credentials.CredentialsError("wrong_name", text)
        return line.Connection(reader, writer, peer)
    except BaseException:
        writer.transport.abort()
        raise


def refused(made: state.State, host: str, error: BaseException) -> None:
    """Notes the refusal of a host, or of a lab, that an error is."""
    reason = between_labs.reason_of(error)
    if isinstance(error, json_lines.Malformed):  # which is no fault of this lab's
        reason = "malformed"
    text = f"refused a connection from {host}: {reason}: {between_labs.in_words(error)}"
    made.note(STRANGERS, text, "refusal", host, reason=reason)
    # Found out here: what strangers say of this lab's certificate is no news of it.
    is_found = isinstance(error, (ssl.SSLCertVerificationError, errors.NebulaError))
    if is_found and reason.endswith(("expired", "not_yet_valid")):
        made.expired = text


class Entrance:
    """The pending connections of one switch."""

    def __init__(
        self, made: state.State, serve: Callable[[line.Connection], Awaitable[None]]
    ) -> None:
        """Starts without any; `serve` is called with each connection of a lab."""
        self._state, self._serve = made, serve
        most = min(MOST_PENDING, pending_connections.most())
        self._pending = pending_connections.Pool(most)
        self._groups: dict[str, str] = {}  # lab -> group of the address it came from

    async def accept(self, listening: socket.socket) -> None:
        """Accepts connections at the outside address until it is cancelled."""
        loop = asyncio.get_running_loop()
        async for sock, address in accepted(listening):
            if self._pending.is_full:
                self.make_room()
            sock.setblocking(False)
            deadline = loop.time() + PENDING_SECONDS
            connected = greeting.Connected(sock)
            pending = pending_connections.Pending(connected, address[0], deadline)
            self._pending.add(pending)
            self._state.begin(self._admit(pending))

    def make_room(self) -> None:
        """Ends a pending connection, so that another one can come."""
        pending = self._pending.to_go(self._groups.values())
        if pending is not None:
            self._pending.remove(pending)
            text = f"refused a connection from {pending.host}: too many others had come"
            about = "refusal", pending.host
            self._state.note(STRANGERS, text, *about, reason="crowded_out")
            with contextlib.suppress(OSError):  # what waits for it finds its end
                pending.sock.shutdown(socket.SHUT_RDWR)

    async def _admit(self, pending: pending_connections.Pending) -> None:
        """Passes on the connection of a lab, or serves one without a certificate."""
        try:
            async with asyncio.timeout_at(pending.deadline):
                connection = await accept(self._state.folder, pending.sock)
                if connection.peer is None:
                    await self._join(connection, pending)
                    return
        except (errors.NebulaError, OSError, EOFError) as error:
            self._refused(pending, error)
            return
        finally:
            has_place = pending in self._pending
            if has_place:
                self._pending.remove(pending)
        if not has_place:  # it was ended to make room
            connection.writer.transport.abort()
            return
        self._groups[connection.peer.lab] = pending.group
        await self._serve(connection)

    async def _join(
        self, connection: line.Connection, pending: pending_connections.Pending
    ) -> None:
        made = self._state
        try:
            stream = connection.reader, connection.writer
            done = await joining.serve(stream, self._ask, HANDSHAKE_SECONDS)
            if done["op"] == "join":
                made.log(f"{done['lab']} has joined the federation")
                about = {"event": "joined", "host": pending.host}
                made.record("federation", done["lab"], **about)
        except json_lines.Nothing:
            pass  # it has seen whose switch this is, as `nebula doctor` does
        except (errors.NebulaError, OSError, ValueError) as error:
            self._refused(pending, error)
        finally:
            await streams.close(connection.writer)

    async def _ask(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Asks the authority, for another lab than its own."""
        if not self._state.is_issuer:
            text = "the authority is at another lab"
            raise credentials.CredentialsError("none", text)
        if fields.get("lab") == (own := self._state.lab):
            text = f"{own} is this lab, which is replaced in its own folder alone"
            raise credentials.CredentialsError("wrong_name", text)
        return await self._state.ask(fields)

    def _refused(
        self, pending: pending_connections.Pending, error: BaseException
    ) -> None:
        if pending in self._pending:  # else there is an entry, with the reason
            refused(self._state, pending.host, error)
