"""The listening side of the bridge: where clusters come, and come back to.

with listener.Listener(endpoints.listen(address), hello, ...) as listening:
    link = listening.accept(timeout)

One thread takes all connections, reads what they begin with as it comes, and waits for
none of them: see `wire.greeting` for the steps, `pending_connections` for the thread.
"""

import queue
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Collection
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import bridge, pending_connections, wan
from nebula_jax.communication import link as link_lib
from nebula_jax.communication.wire import activity, frames, greeting, session, states
from nebula_jax.security import names as names_lib

MAX_WAITING = 64  # clusters that have come, and nobody has accepted yet
MAX_ENDED = 64  # sessions remembered, so that a peer who comes back gets the reason


class Refused(errors.NebulaError):
    """A peer that is not let in; it is sent the reason."""


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
        tls: Callable[[], ssl.SSLContext] | None = None,
        clusters: Collection[str] | None = None,
        may_return: bool = False,
        line: wan.Line = wan.UNSHAPED,
        log: Callable[[str], None] = print,
        check: bridge.Check = bridge.no_further_check,
        work: activity.Work | None = None,
        finish: greeting.Finish = greeting.inside_tls,
    ) -> None:
        """Starts to take connections.

        Args:
          listening: bound and listening socket; closed with the listener.
          hello: this side's. It is sent to who is expected alone, and with TLS has the
            certificate.
          tls: makes a server context for each connection (one for several would let a
            revoked peer resume its session); None for plain TCP.
          clusters: names of those that may come, each once; None for any.
          may_return: whether a cluster may rejoin as long as this listener is open: its
            former link then ends. Without TLS anybody can take a cluster's place.
          log: called with a line when a connection is dropped or refused (one line for
            many, if there are many), and when a known one breaks or comes back.
          peer_timeout, reconnect_timeout, line, check, work, finish: as in
            `bridge.connect`.
        """
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._hello, self._tls = hello, tls
        self._check, self._finish = check, finish
        self._clusters, self._may_return = clusters, may_return
        self._peer_timeout = peer_timeout
        self._settings: dict[str, Any] = {
            "reconnect_timeout": reconnect_timeout,
            "line": line,
            "log": log,
            "work": work or activity.Work(),
        }
        self._dropped = pending_connections.RejectedLog(log)
        self._refused = pending_connections.RejectedLog(log)
        self._sessions: dict[bytes, link_lib.Link] = {}
        self._hosts: dict[bytes, str] = {}  # session -> group of its peer's address
        self._came: queue.Queue[link_lib.Link] = queue.Queue(MAX_WAITING)
        self._acceptor = pending_connections.Acceptor(
            listening,
            self._answered,
            greeting.PENDING_SECONDS,
            known=self._known,
            dropped=self._dropped.add,
        )

    def accept(self, timeout: float, with_ended: bool = False) -> link_lib.Link:
        """Waits at most `timeout` s for a cluster whose Hello agrees with this side's.

        With `with_ended` one that has come and gone again counts: its link has the
        reason. Raises bridge.NobodyThere if nobody came in time; bridge.Mismatch if one
        came whose version or settings differ.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                link = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise bridge.NobodyThere(
                    f"nobody came within {timeout:g} s (connect_timeout)"
                ) from None
            # What differs is reported though the peer, which found it too, has gone.
            bridge.greet(link, self._hello, self._check)
            if with_ended or not link.is_over:
                return link

    def give_up(self, owner: str, reason: str, may_return: bool = False) -> None:
        """Ends the links of peers that cannot come back.

        `owner` has the DNS names of their certificate, or is empty for all of them;
        with `may_return` they are waited for, and given the reason if they do not come.
        """
        for link in list(self._sessions.values()):
            if not link.is_over and owner in ("", link.owner):
                link.give_up(reason, may_return)

    def close(self) -> None:
        """Takes no more connections. Links go on, but cannot come back."""
        self._acceptor.close()
        self._dropped.flush()
        self._refused.flush()
        while not self._came.empty():
            self._came.get().abort(f"{self._hello.cluster} takes no more clusters")

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # For the acceptor's thread.

    def _known(self) -> set[str]:
        links = self._sessions.items()
        return {self._hosts[number] for number, link in links if not link.is_over}

    def _call_signs(self) -> list[bytes]:
        """Returns those of the sessions that may come back."""
        links = self._sessions.items()
        numbers = [number for number, link in links if not link.is_over]
        return [greeting.call_sign(number).encode() for number in numbers]

    def _answered(self, pending: pending_connections.Pending) -> greeting.Steps[None]:
        """Takes a connection's steps, and sends the reason to one that is refused."""
        try:
            yield from self._steps(pending)
        except (Refused, session.SessionOver, greeting.PlainPeer) as error:
            line = f"refused a connection from {pending.host}: {error}"
            # Anybody can send a frame without TLS: it hides no other refusal.
            is_plain = isinstance(error, greeting.PlainPeer)
            log = self._dropped if is_plain else self._refused
            log.add(line, time.monotonic())
            yield from greeting.refuse(pending.connected, str(error))

    def _steps(self, pending: pending_connections.Pending) -> greeting.Steps[None]:
        """Brings a connection to its link, which is made if its session is new."""
        if self._tls is not None:
            sock = pending.sock
            record = yield from greeting.client_hello(sock)
            pending.is_expected = any(sign in record for sign in self._call_signs())
            pending.has_begun = True
            yield selectors.EVENT_READ  # in turn: what follows takes milliseconds
            secure = self._tls().wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
            pending.connected = greeting.Connected(secure)
            yield from greeting.shake_hands(secure)
            pending.connected = yield from self._finish(secure)
            pending.is_expected = True
        connected = pending.connected
        self._check_certificate(connected)
        opening, acknowledged = yield from greeting.read_opening(connected)
        link = self._find(opening, acknowledged)
        if link is not None:
            link.attach(connected, opening, acknowledged)
            pending.is_taken = True
            return
        number = opening.session_id
        new = session.Session(states.Role.LISTENER, number, self._peer_timeout)
        new.resume(opening, acknowledged, time.monotonic(), connected.tags)
        peer = yield from greeting.exchange_hellos(connected.sock, new)
        if self._find(opening, acknowledged) is not None:  # meanwhile
            raise session.RemoteProtocolError(f"{peer.cluster} came twice at once")
        self._check_peer(peer, connected)
        if self._came.full():
            waited_for = self._hello.cluster
            raise Refused(f"too many clusters wait for {waited_for}")
        new.send(self._hello)
        link = link_lib.Link(new, self._hello.cluster, **self._settings)
        try:
            link.start(connected)
        except BaseException:
            link.abort("this process cannot take one more peer")
            raise
        pending.is_taken = True
        self._forget_ended()
        self._sessions[number] = link
        self._hosts[number] = pending.group
        self._came.put_nowait(link)

    def _check_certificate(self, connected: greeting.Connected) -> None:
        """Raises Refused unless a cluster that may come can have this certificate."""
        if connected.clusters is None or self._clusters is None:
            return
        if not connected.clusters & {names_lib.label(each) for each in self._clusters}:
            owner = printable.line(connected.owner) or "nobody's DNS name"
            raise Refused(f"a certificate for {owner} was not expected")

    def _check_peer(self, peer: frames.Hello, connected: greeting.Connected) -> None:
        """Admits a new peer, for whom a link of the same name ends if it has to.

        A certificate names its cluster. Without TLS, a name is all that a peer has to
        show. Raises Refused if it may not have this name, or not now.
        """
        cluster = peer.cluster
        try:
            bridge.check_certificate(cluster, connected)
        except bridge.Mismatch as error:
            raise Refused(str(error)) from None
        if self._clusters is not None and cluster not in self._clusters:
            raise Refused(f"{cluster} was not expected")
        for link in self._sessions.values():
            if link.peer.cluster == cluster and not link.is_over:
                self._make_room(link, peer, connected)

    def _make_room(
        self, link: link_lib.Link, peer: frames.Hello, connected: greeting.Connected
    ) -> None:
        cluster = peer.cluster
        anew = f"{cluster} was started anew"
        newest = max(peer.checkpoints, default=0)
        has = f"step {newest}" if newest else "none"
        again = f"{session.START_AGAIN} ({cluster} has saved {has})"
        if self._may_return:
            try:  # before who is there loses its place to one that cannot take part
                bridge.check_agreement(self._hello, peer)
            except bridge.Mismatch as error:
                raise Refused(str(error)) from None
            link.give_up(f"{anew}, without its session")
        elif not link.is_away:
            raise Refused(f"{cluster} is here already")
        elif not link.has_begun:
            link.abort(anew)
        elif not connected.owner:  # anybody could end a run whose line breaks
            raise Refused(
                f"{cluster} is expected back, not anew; if its process has ended, end"
                f" the others too and {again}"
            )
        else:  # both start again, and go on from what is saved
            link.give_up(f"{anew}, so its session cannot go on: {again}")
            raise Refused(f"the session that {cluster} had is over now: {again}")

    def _find(self, opening: frames.Open, acknowledged: int) -> link_lib.Link | None:
        """Returns the link of a session; None if it is to be made."""
        link = self._sessions.get(opening.session_id)
        if acknowledged:
            if link is None:
                raise session.SessionOver(
                    f"{self._hello.cluster} does not have this session: was it"
                    f" restarted? Then {session.START_AGAIN}"
                )
        elif link is not None and link.was_lost:  # before the peer had our Hello:
            return None  # it begins again, and may take the same number
        return link

    def _forget_ended(self) -> None:
        """Forgets the oldest of the sessions that have ended, if there are many."""
        ended = [number for number, link in self._sessions.items() if link.is_over]
        for number in ended[: len(ended) - MAX_ENDED]:
            del self._sessions[number], self._hosts[number]
