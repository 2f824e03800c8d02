"""THE cross-cluster boundary: how clusters meet.

    with bridge.connect(address, hello, ...) as link:
        tokens = link.sender("tokens", spec, codecs.pack_ids(vocab_size))
        step = link.wait_for_welcome(timeout)
        tokens.send(step + 1, arrays)      # encode on device -> frames -> socket
        link.wait_for_step(step + 1)

A Link (see `link`) is one conversation; here is how two clusters come to have one, and
how a connector finds its way back to it when the line broke.
"""

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames
from nebula_jax.communication.wire import session as protocol
from nebula_jax.security import tls as tls_lib

HANDSHAKE_SECONDS = 5.0  # an accepted connection opens a session within this, or goes
MAX_HANDSHAKES = 16  # at a time: strangers who dawdle take neither memory nor threads
MAX_WAITING = 64  # clusters that have come, and nobody has accepted yet
MAX_SESSIONS = 1024  # remembered, so that one who comes back hears how they ended
RETRY_SECONDS = 0.2  # between attempts to connect
REDIAL_SECONDS = 5.0  # for one attempt to come back
ACCEPT_SECONDS = 0.5  # how often a listener looks whether it shall end


class ConnectError(errors.NebulaError):
    """No usable connection came about."""


class Mismatch(errors.NebulaError):
    """Two clusters do not agree on what they are about to do."""


def check_agreement(ours: frames.Hello, theirs: frames.Hello) -> None:
    """Raises Mismatch, in words, unless both clusters run the same thing."""
    if ours.version != theirs.version:
        raise Mismatch(
            f"{theirs.cluster} runs nebula_jax {theirs.version},"
            f" {ours.cluster} {ours.version}"
        )
    for name in sorted(ours.settings.keys() | theirs.settings.keys()):
        mine, other = ours.settings.get(name), theirs.settings.get(name)
        if mine != other:
            raise Mismatch(
                f"{theirs.cluster} has {name}={_brief(other)},"
                f" {ours.cluster} has {name}={_brief(mine)}"
            )


def _no_more(peer: frames.Hello) -> None:
    """Nothing is compared but versions and settings."""


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def connect(
    address: tuple[str, int],
    hello: frames.Hello,
    *,
    connect_timeout: float,
    peer_timeout: float,
    reconnect_timeout: float,
    peer: str,
    tls: Callable[[], ssl.SSLContext] | None,
    line: wan.Line = wan.UNSHAPED,
    log: Callable[[str], None] = print,
    check: Callable[[frames.Hello], None] = _no_more,
) -> Link:
    """Comes to a listening cluster.

    Args:
      address: host and port.
      hello: this side's.
      connect_timeout: seconds to keep trying for.
      peer_timeout: seconds of silence after which a connection counts as lost.
      reconnect_timeout: seconds that a lost connection may take to come back; 0 to
        give up at once.
      peer: the name that the listener's certificate must carry.
      tls: makes a client context, see `security.tls`; None for plain TCP, on which
        anybody can listen and speak.
      line: what to emulate for all that this side sends.
      log: told about connections that break and come back.
      check: given the peer's Hello; raises Mismatch if it does not agree with ours in
        what only the caller can compare. To be given on both sides, so that each says
        what it sees, however soon the other one leaves.

    Returns:
      A link whose peer has said a Hello that agrees with ours.

    Raises:
      ConnectError: if nobody answers, or TLS fails.
      Mismatch: if the peer runs something else.
    """
    deadline = time.monotonic() + connect_timeout
    sock = _dial(address, peer, tls, deadline, connect_timeout)
    link = Link(
        protocol.Role.CONNECTOR,
        hello,
        peer_timeout=peer_timeout,
        reconnect_timeout=reconnect_timeout,
        line=line,
        log=log,
        dial=lambda: _dial(address, peer, tls, time.monotonic() + REDIAL_SECONDS, 0.0),
    )
    link.start(sock)
    _greet(link, hello, max(RETRY_SECONDS, deadline - time.monotonic()), check)
    return link


def _dial(
    address: tuple[str, int],
    peer: str,
    tls: Callable[[], ssl.SSLContext] | None,
    deadline: float,
    patience: float,
) -> socket.socket:
    """A connected socket; tries again for `patience` seconds while nobody answers."""
    where = f"{address[0]}:{address[1]}"
    give_up = time.monotonic() + patience
    while True:
        sock = None
        try:
            timeout = max(RETRY_SECONDS, deadline - time.monotonic())
            sock = socket.create_connection(address, timeout=timeout)
            if tls is None:
                return sock
            sock = tls().wrap_socket(
                sock, server_hostname=peer, do_handshake_on_connect=False
            )
            return _shake_hands(sock, time.monotonic() + timeout)
        except UnicodeError:
            raise ConnectError(f"{where} is no address") from None
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, ssl.SSLError) and not isinstance(
                error, ssl.SSLEOFError | ssl.SSLZeroReturnError
            ):
                text = f"no TLS with {peer} at {where}: {error}"
                raise ConnectError(text) from None
            if not isinstance(error, OSError):
                raise
            if time.monotonic() + RETRY_SECONDS > give_up:
                after = f" after {patience:g} s (--connect_timeout)" if patience else ""
                raise ConnectError(
                    f"nobody answers at {where}{after}: {error.strerror or error}"
                ) from None
        time.sleep(RETRY_SECONDS)


def _shake_hands(sock: ssl.SSLSocket, deadline: float) -> ssl.SSLSocket:
    """A TLS handshake by a deadline, however slowly the other side drips."""
    sock.setblocking(False)
    poller = select.poll()
    while True:
        try:
            sock.do_handshake()
            return sock
        except ssl.SSLWantReadError:
            poller.register(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poller.register(sock, select.POLLOUT)
        if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the TLS handshake took too long")


def _greet(
    link: Link,
    hello: frames.Hello,
    timeout: float,
    check: Callable[[frames.Hello], None],
) -> None:
    try:
        link.wait_for_hello(timeout)
        check_agreement(hello, link.peer)
        _check_certificate(link)
        check(link.peer)
    except errors.NebulaError as error:
        link.abort(str(error))
        raise


def _check_certificate(link: Link) -> None:
    """With TLS, a cluster may only speak under the name its certificate carries."""
    names = link.certificate_names
    if names is not None and tls_lib.certificate_name(link.peer.cluster) not in names:
        owner = ", ".join(sorted(names)) or "nobody's DNS name"
        raise Mismatch(f"{link.peer.cluster} shows a certificate for {owner}")


def listen(address: tuple[str, int]) -> socket.socket:
    """A bound and listening socket.

    Raises:
      ConnectError: if the port is in use, or the host is not one of this machine.
    """
    try:
        return socket.create_server(address, reuse_port=False)
    except OSError as error:
        raise ConnectError(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}"
        ) from None


class Listener:
    """Where other clusters come, and come back to when the line broke.

        with bridge.Listener(bridge.listen(address), hello, ...) as listener:
            link = listener.accept(timeout)

    It has to stay open for as long as its links live: a thread takes connections,
    hands those of known sessions to their links, and drops strangers.
    """

    def __init__(
        self,
        listening: socket.socket,
        hello: frames.Hello,
        *,
        peer_timeout: float,
        reconnect_timeout: float,
        tls: Callable[[], ssl.SSLContext] | None,
        line: wan.Line = wan.UNSHAPED,
        log: Callable[[str], None] = print,
        check: Callable[[frames.Hello], None] = _no_more,
    ):
        """Begins to take connections.

        Args:
          listening: bound and listening socket; closed with the listener.
          hello: this side's.
          peer_timeout: seconds of silence after which a connection counts as lost.
          reconnect_timeout: seconds that a peer may take to come back.
          tls: makes a fresh server context per connection (a context kept for several
            would let a revoked peer resume its session), or None for plain TCP.
          line: what to emulate for all that this side sends.
          log: told about dropped strangers, and connections that break and come back.
          check: as in `connect`.
        """
        self._check = check
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._listening, self._hello, self._tls, self._log = listening, hello, tls, log
        self._settings = {
            "peer_timeout": peer_timeout,
            "reconnect_timeout": reconnect_timeout,
            "line": line,
            "log": log,
        }
        self._sessions: dict[bytes, Link] = {}
        self._lock = threading.Lock()
        self._came: queue.Queue[Link | Mismatch] = queue.Queue(MAX_WAITING)
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def accept(self, timeout: float) -> Link:
        """Waits for a cluster to come.

        Returns:
          A link whose peer has said a Hello that agrees with ours.

        Raises:
          ConnectError: if nobody came in time.
          Mismatch: if one came that runs something else.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                came = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ConnectError(
                    f"nobody came within {timeout:g} s (--connect_timeout)"
                ) from None
            if isinstance(came, Mismatch):
                raise came
            if not came.is_over:  # it may have gone again
                return came

    def close(self) -> None:
        """Takes no more connections. Links go on, but cannot come back."""
        self._is_closed = True
        self._thread.join()
        self._listening.close()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(came := self._came.get_nowait(), Link):
                    came.abort(f"{self._hello.cluster} takes no more clusters")

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def _run(self) -> None:
        self._listening.settimeout(ACCEPT_SECONDS)
        while not self._is_closed:
            # While too many are at it, who comes waits in the system's queue.
            if not self._handshakes.acquire(timeout=ACCEPT_SECONDS):
                continue
            try:
                sock, address = self._listening.accept()
                threading.Thread(
                    target=self._open, args=(sock, address[0]), daemon=True
                ).start()
            except TimeoutError:
                self._handshakes.release()
            except (OSError, RuntimeError):  # it went again; no descriptors, no threads
                self._handshakes.release()
                time.sleep(RETRY_SECONDS)

    def _open(self, sock: socket.socket, host: str) -> None:
        """Finds out what a new connection is for."""
        try:
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            if self._tls is not None:
                sock = self._tls().wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
                _shake_hands(sock, deadline)
            opening, taken = protocol.read_opening(_read_exactly(sock, deadline))
            link, is_new = self._session(opening.session, is_known=taken > 0)
            if link is None:
                raise protocol.SessionOver(
                    f"{self._hello.cluster} knows nothing of this session: was it"
                    " started anew?"
                )
            link.attach(sock, opening, taken)
            if is_new:
                self._greet(link)
        except Mismatch as error:
            self._offer(error)
        except Exception as error:  # whatever a stranger brings about, others may come
            if not self._is_closed:
                self._log(f"dropped a connection from {host}: {error}")
            if isinstance(error, protocol.SessionOver):
                _refuse(sock, str(error))
            sock.close()
        finally:
            self._handshakes.release()

    def _session(self, session: bytes, is_known: bool) -> tuple[Link | None, bool]:
        """The link of a session, made if nobody has said anything on it yet.

        Returns:
          The link, or None for a session that should be known and is not; whether it
          is new.
        """
        with self._lock:
            if session in self._sessions:
                return self._sessions[session], False
            if is_known:
                return None, False
            for old in list(self._sessions)[: -MAX_SESSIONS + 1]:
                if self._sessions[old].is_over:
                    del self._sessions[old]
            link = Link(
                protocol.Role.LISTENER, self._hello, session=session, **self._settings
            )
            self._sessions[session] = link
            return link, True

    def _greet(self, link: Link) -> None:
        try:
            _greet(link, self._hello, HANDSHAKE_SECONDS, self._check)
        except errors.NebulaError:
            with self._lock:
                del self._sessions[link.session]
            raise
        self._offer(link)

    def _offer(self, came: Link | Mismatch) -> None:
        try:
            self._came.put_nowait(came)
        except queue.Full:
            if isinstance(came, Link):
                came.abort(f"too many clusters wait for {self._hello.cluster}")


def _refuse(sock: socket.socket, reason: str) -> None:
    """Says why a connection cannot be taken up."""
    with contextlib.suppress(OSError):
        sock.settimeout(HANDSHAKE_SECONDS)
        for buffer in frames.encode(frames.Abort(reason), 0, 0):
            sock.sendall(buffer)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1 << 16)  # unread bytes would reset our words away


def _read_exactly(sock: socket.socket, deadline: float) -> bytes:
    """The first frame of a connection."""
    data = bytearray(protocol.OPENING_BYTES)
    view = memoryview(data)
    while len(view):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("it said nothing and went")
        view = view[count:]
    return bytes(data)
