"""Connections between switches: made and accepted, each with a context of its own.

A context that served for several would resume sessions, and let a revoked lab back in.
"""

import asyncio
import socket
import ssl
from typing import NamedTuple

from nebula_jax.federation import keep_alive
from nebula_jax.security import policy
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import peer_tls

CONNECT_SECONDS = 5.0  # TCP's own pauses grow: it would knock again after a minute
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 1.0
LIMIT_BYTES = 1 << 17  # of a reader's buffer


class Connection(NamedTuple):
    """A TLS connection, after its handshake."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lab: str
    """The other lab; empty if it has shown no certificate."""
    serial: int
    """The serial number of its certificate."""
    expires: float
    """The end of its certificate, unix seconds."""


async def accept(folder: site_folder.Folder, sock: socket.socket) -> Connection:
    """Shakes hands with who has connected.

    Args:
      folder: of this lab.
      sock: that was accepted; closed if this raises.

    Raises:
      federation.Refusal: with the reason, if it must not be used.
      OSError: if there was no handshake; ssl.SSLError is one.
    """
    loop = asyncio.get_running_loop()
    try:
        floor = policy.load(folder.path / policy.FILE).tls
        context = peer_tls.server_context(folder, "switch", floor, allows_joining=True)
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
    return _checked(folder, reader, writer, allows_none=True)


async def dial(folder: site_folder.Folder, address: tuple[str, int]) -> Connection:
    """Connects to the switch at an address, whichever lab's it is.

    Args:
      folder: of this lab.
      address: host and port.

    Raises:
      federation.Refusal: with the reason, if it must not be used.
      OSError: if nobody answers in time, or there was no handshake.
    """
    floor = policy.load(folder.path / policy.FILE).tls
    context = peer_tls.client_context(folder, "switch", floor)
    context.check_hostname = False  # the certificate has the lab's name, not the host's
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
    return _checked(folder, reader, writer)


def _checked(
    folder: site_folder.Folder,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    allows_none: bool = False,
) -> Connection:
    """Checks who it is; closes the connection if it must not be used."""
    try:
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        der = tls.getpeercert(True)
        if der is None and allows_none:
            return Connection(reader, writer, "", 0, float("inf"))
        peer = peer_tls.check_peer(der, folder)
        if peer.role != "switch":
            raise peer_tls.PeerRefused("wrong_name", f"a {peer.role}, not a switch")
        keep_alive.probe(writer.get_extra_info("socket"))
        return Connection(reader, writer, peer.lab, peer.serial, peer.end.timestamp())
    except BaseException:
        writer.transport.abort()
        raise
