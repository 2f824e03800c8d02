"""The first frames of a connection, before there is a link, without waiting.

Each function is a generator that reads like code that waits. It yields what its socket
lacks, EVENT_READ or EVENT_WRITE, and is resumed when the socket is ready: by the
listener, which has many such connections at once in one thread, or by `run`, which
waits for one.

A connection from anybody costs a descriptor and what is here: no thread, and no TLS
before the whole of its first record has come.
"""

import contextlib
import hashlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from nebula_jax import errors
from nebula_jax.communication.wire import frames, integrity, reader, session
from nebula_jax.security import tls as tls_lib
from nebula_jax.security.tls import credentials

T = TypeVar("T")
Steps = Generator[int, None, T]

PENDING_SECONDS = 20.0  # for a connection to find its session, on a slow line as well
TLS_HEAD = 5  # bytes before a record: kind, version, length
TLS_HANDSHAKE = b"\x16\x03"  # the kind, and the first byte of every version since SSL 3
MAX_CLIENT_HELLO = 1 << 14  # bytes: a record holds no more
MAX_DRAINED = 1 << 17  # bytes of a refused peer, Hello and all, that are read first


class Connected(NamedTuple):
    """A connection on which frames can cross."""

    sock: socket.socket  # non-blocking
    tags: integrity.Both = integrity.PLAIN  # the tags of its frames
    owner: str = ""  # the DNS names of the peer's certificate; empty without TLS
    clusters: frozenset[str] | None = None  # labels of those that the peer may be


class NoTls(ConnectionError):
    """A peer whose first bytes begin no TLS."""


class PlainPeer(errors.NebulaError):
    """A peer that sends a frame where TLS has to begin."""


Finish = Callable[[ssl.SSLSocket], Steps[Connected]]
"""Takes the steps between a TLS handshake and the first frame."""


def run(steps: Steps[T], sock: socket.socket, deadline: float, silence: float) -> T:
    """Takes all steps, waiting for the socket in between.

    Raises what the steps do, and TimeoutError at the monotonic time `deadline`, or
    after `silence` seconds without anything from the peer.
    """
    with selectors.PollSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            try:
                selector.modify(sock, next(steps))
            except StopIteration as end:
                return end.value
            seconds = max(0.0, min(silence, deadline - time.monotonic()))
            if not selector.select(seconds):
                raise TimeoutError(f"nothing came for {seconds:.1f} s")


def call_sign(session_id: bytes) -> str:
    """Returns what marks a session's connections before TLS has begun.

    The connector sends it as the name of an application protocol, and a listener serves
    it first. It proves nothing, since who can read the line can repeat it. Floods
    mostly come from others, who cannot guess it.
    """
    return hashlib.blake2b(session_id, digest_size=16).hexdigest()


def client_hello(sock: socket.socket) -> Steps[bytes]:
    """Waits for a TLS client's first record, which stays on the socket; returns it.

    Raises PlainPeer if a frame comes; ConnectionError at anything else, or the end.
    """
    head = yield from _peek(sock, TLS_HEAD)
    if head.startswith(integrity.CHECKSUMS.magic):
        raise PlainPeer(
            "it sent a frame without TLS: that is on here, and off there (tls)"
        )
    if not head.startswith(TLS_HANDSHAKE):
        raise NoTls(f"it sent {head!r}, which begins no TLS")
    length = int.from_bytes(head[3:])
    if length > MAX_CLIENT_HELLO:
        raise ConnectionError(f"it began TLS with a record of {length} bytes")
    return (yield from _peek(sock, TLS_HEAD + length))


def _peek(sock: socket.socket, count: int) -> Steps[bytes]:
    """Waits for so many bytes, and leaves them on the socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)  # not for fewer
    seen = 0
    while True:
        receive = when_ready(selectors.EVENT_READ, sock.recv, count, socket.MSG_PEEK)
        data = yield from receive
        if len(data) == count:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return data
        if len(data) <= seen:  # it is the end that made the socket ready
            raise ConnectionError("it closed the connection before a handshake")
        seen = len(data)
        yield selectors.EVENT_READ


def shake_hands(sock: ssl.SSLSocket) -> Steps[None]:
    """Completes a TLS handshake.

    Raises credentials.CredentialsError if the peer's certificate must not be used;
    OSError, of which ssl.SSLError is one, if there was no handshake.
    """
    yield from when_ready(selectors.EVENT_READ, sock.do_handshake)
    credentials.check_peer(sock.getpeercert(True) or b"")


def inside_tls(sock: ssl.SSLSocket) -> Steps[Connected]:
    """Lets frames cross inside TLS, from a cluster that the certificate names."""
    yield from ()
    names = tls_lib.certificate_names(sock)
    return Connected(sock, owner=", ".join(sorted(names)), clusters=names)


def read_opening(connected: Connected) -> Steps[tuple[frames.Open, int]]:
    """Reads the first frame of a connection; see `reader.read_opening`.

    Raises ConnectionError if the connection ends before; frames.Damaged,
    frames.FrameError if it is something else.
    """
    tags = connected.tags.received
    size = frames.frame_bytes(frames.Open, tags=tags)
    data = yield from read_exactly(connected.sock, size)
    return reader.read_opening(data, tags)


def read_exactly(sock: socket.socket, count: int) -> Steps[bytes]:
    """Reads so many bytes; raises ConnectionError if the connection ends before."""
    data = bytearray(count)
    left = memoryview(data)
    while len(left):
        count = yield from when_ready(selectors.EVENT_READ, sock.recv_into, left)
        if not count:
            raise ConnectionError("it closed the connection before it sent a frame")
        left = left[count:]
    return bytes(data)


def exchange_hellos(
    sock: socket.socket, session_: session.Session
) -> Steps[frames.Hello]:
    """Sends what a session has to until the peer's Hello, unchecked, has come.

    What has come after it stays in the session. The socket is non-blocking. Raises
    OSError, session.PeerGone if the connection breaks; session.PeerAborted if the peer
    gives up; frames.Damaged if bytes are not those that were sent;
    session.RemoteProtocolError if it breaks the protocol.
    """
    while session_.hello is None:
        while buffers := session_.data_to_send(time.monotonic()):
            for buffer in buffers:
                yield from send(sock, buffer)
        view = session_.buffer.get_buffer()
        count = yield from when_ready(selectors.EVENT_READ, sock.recv_into, view)
        if not count:
            raise session.PeerGone(f"{session_.peer} closed the connection")
        session_.receive(count, time.monotonic())
        if session_.hello is None:
            for message in session_.events():
                if isinstance(message, frames.Abort):
                    raise session.PeerAborted(message.reason)
    return session_.hello


def refuse(connected: Connected, reason: str) -> Steps[None]:
    """Sends the reason why a connection is not taken up, and waits until it is read."""
    sock = connected.sock
    for buffer in frames.encode(frames.Abort(reason), 0, 0, connected.tags.sent):
        yield from send(sock, buffer)
    sock.shutdown(socket.SHUT_WR)
    drained = 0  # bytes left unread would reset the reason away
    while drained < MAX_DRAINED:
        data = yield from when_ready(selectors.EVENT_READ, sock.recv, 1 << 14)
        if not data:
            return
        drained += len(data)


def send(sock: socket.socket, buffer: Any) -> Steps[None]:
    """Sends all bytes of a buffer."""
    view = memoryview(buffer)
    while len(view):
        count = yield from when_ready(selectors.EVENT_WRITE, sock.send, view)
        view = view[count:]


def when_ready(events: int, call: Callable[..., T], *args: Any) -> Steps[T]:
    """Makes a call until it is done; waits for `events`, or for what TLS wants."""
    while True:
        try:
            return call(*args)
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
        except BlockingIOError:
            yield events


def set_up(sock: socket.socket) -> socket.socket:
    """Makes a connected socket one that never waits, and sends small frames at once."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # not a TCP socket, or it has gone again
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
