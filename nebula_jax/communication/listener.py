"""The listening side of the bridge: where clusters come, and come back to.

with listener.Listener(listener.listen(address), hello, ...) as listening:
    link = listening.accept(timeout)
"""

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import bridge, wan
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, reader, session, states

BACKLOG = 1024  # who has come and was not yet taken: the system drops who is beyond
HANDSHAKE_SECONDS = 5.0  # an accepted connection opens a session within this, or goes
MAX_HANDSHAKES = 16  # at a time: limits the memory and threads of unknown connections
MAX_WAITING = 64  # clusters that have come, and nobody has accepted yet
MAX_SESSIONS = 1024  # remembered, so that a peer who comes back gets the reason
ACCEPT_SECONDS = 0.5  # how often a listener looks whether it shall end
RETRY_SECONDS = 0.2  # after the system refused a connection or a thread


def listen(address: tuple[str, int]) -> socket.socket:
    """Returns a bound and listening socket.

    Args:
      address: host and port; at `::` both IPv6 and IPv4 where the system can.

    Raises:
      bridge.ConnectError: if the port is in use, or the host is not this machine's.
    """
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # of a name with both
        family, _, _, _, where = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dual)
            sock.bind(where)  # which has the zone of fe80::1%eth0
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise bridge.ConnectError(
            f"cannot listen on {bridge.written(address)}: {reason}"
        ) from None
    return sock


class Listener:
    """A thread that takes connections.

    It gives those of known sessions to their links, and drops others. It has to stay
    open for as long as its links live.
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
        check: Callable[[frames.Hello], None] = bridge.no_further_check,
        work: activity.Work | None = None,
    ) -> None:
        """Starts to take connections.

        Args:
          listening: bound and listening socket; closed with the listener.
          hello: this side's.
          peer_timeout: seconds of silence after which a connection counts as lost.
          reconnect_timeout: seconds that a peer may take to come back.
          tls: makes a fresh server context per connection (a context kept for several
            would let a revoked peer resume its session), or None for plain TCP.
          line: what to emulate for all that this side sends.
          log: called with a line when an unknown connection is dropped, and when a
            known one breaks or comes back.
          check, work: as in `bridge.connect`.
        """
        self._check = check
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._listening, self._hello, self._tls, self._log = listening, hello, tls, log
        self._settings: dict[str, Any] = {
            "peer_timeout": peer_timeout,
            "reconnect_timeout": reconnect_timeout,
            "line": line,
            "log": log,
            "work": work or activity.Work(),
        }
        self._sessions: dict[bytes, Link] = {}
        self._lock = threading.Lock()
        self._came: queue.Queue[Link | bridge.Mismatch] = queue.Queue(MAX_WAITING)
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def accept(self, timeout: float) -> Link:
        """Waits for a cluster to come.

        Returns:
          A link whose peer has sent a Hello that agrees with this one.

        Raises:
          bridge.ConnectError: if nobody came in time.
          bridge.Mismatch: if one came whose version or settings differ.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                came = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise bridge.ConnectError(
                    f"nobody came within {timeout:g} s (--connect_timeout)"
                ) from None
            if isinstance(came, bridge.Mismatch):
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

    def __exit__(self, *exception: object) -> None:
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
        """Finds the session of a new connection."""
        try:
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            if self._tls is not None:
                sock = self._tls().wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
                bridge.shake_hands(sock, deadline)
            opening, acknowledged = reader.read_opening(_read_exactly(sock, deadline))
            link, is_new = self._session(opening.session_id, is_known=acknowledged > 0)
            if link is None:
                raise session.SessionOver(
                    f"{self._hello.cluster} does not have this session: was it"
                    " restarted?"
                )
            link.attach(sock, opening, acknowledged)
            if is_new:
                self._greet(link)
        except bridge.Mismatch as error:
            self._offer(error)
        except Exception as error:  # whatever one connection raises, others may come
            if not self._is_closed:
                self._log(f"dropped a connection from {host}: {error}")
            if isinstance(error, session.SessionOver):
                _refuse(sock, str(error))
            sock.close()
        finally:
            self._handshakes.release()

    def _session(self, session_id: bytes, is_known: bool) -> tuple[Link | None, bool]:
        """Finds the link of a session, or makes it if nothing was received on it yet.

        Returns:
          The link, or None for a session that should be known and is not; True if it is
          new.
        """
        with self._lock:
            if session_id in self._sessions:
                return self._sessions[session_id], False
            if is_known:
                return None, False
            for old in list(self._sessions)[: -MAX_SESSIONS + 1]:
                if self._sessions[old].is_over:
                    del self._sessions[old]
            link = Link(
                states.Role.LISTENER,
                self._hello,
                session_id=session_id,
                **self._settings,
            )
            self._sessions[session_id] = link
            return link, True

    def _greet(self, link: Link) -> None:
        try:
            bridge.greet(link, self._hello, HANDSHAKE_SECONDS, self._check)
        except errors.NebulaError:
            with self._lock:
                del self._sessions[link.session_id]
            raise
        self._offer(link)

    def _offer(self, came: Link | bridge.Mismatch) -> None:
        try:
            self._came.put_nowait(came)
        except queue.Full:
            if isinstance(came, Link):
                came.abort(f"too many clusters wait for {self._hello.cluster}")


def _refuse(sock: socket.socket, reason: str) -> None:
    """Sends the reason why a connection cannot be taken up."""
    with contextlib.suppress(OSError):
        sock.settimeout(HANDSHAKE_SECONDS)
        for buffer in frames.encode(frames.Abort(reason), 0, 0):
            sock.sendall(buffer)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1 << 16)  # unread bytes would reset the reason away


def _read_exactly(sock: socket.socket, deadline: float) -> bytes:
    """Returns the first frame of a connection."""
    data = bytearray(reader.OPENING_BYTES)
    view = memoryview(data)
    while len(view):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("it sent nothing and went")
        view = view[count:]
    return bytes(data)
