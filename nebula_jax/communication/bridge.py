"""The cross-cluster boundary: how a cluster comes to one that listens.

    with bridge.connect(address, hello, ...) as link:
        tokens = link.sender("tokens", spec, codecs.pack_ids(vocab_size))
        step = link.wait_for_welcome(timeout)
        tokens.send(step + 1, arrays)      # encode on device -> frames -> socket
        link.wait_for_step(step + 1)

Both sides compare their Hellos, and part with an error that names the difference.
"""

import functools
import random
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import agreement, endpoints, wan
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import (
    activity,
    driver,
    frames,
    greeting,
    reconnect,
    session,
    states,
)
from nebula_jax.security import names as names_lib
from nebula_jax.security import tls as tls_lib

RETRY_SECONDS = 0.2  # between attempts to connect, at first
WAITED_SHARE = 0.1  # of the seconds waited so far, later: up to `LONGEST_PAUSE`
SHOWN = 80  # characters of a setting's name or value
SILENT_SECONDS = 5.0  # with TCP and TLS without a byte, until the next attempt
SESSION_ID_BYTES = 16
NOBODY = "nobody answers"
# What may be damage on the way, or a peer that is about to start.
RETRIED = (OSError, session.PeerGone, frames.Damaged)
ENDED = (
    *(session.PeerGone, session.PeerAborted, session.SessionOver),
    *(session.RemoteProtocolError, driver.LineFailed),
)
"""Errors of a link that has ended, or whose peer breaks the protocol."""


class ConnectError(errors.NebulaError):
    """A connection that could not be made."""


class PeerLost(ConnectError, errors.PeerLost):
    """An attempt to reach a peer that cannot come back."""


class NobodyThere(ConnectError, errors.PeerAbsent):
    """A cluster that did not come, or does not answer, within connect_timeout."""


Mismatch = agreement.Mismatch


def check_agreement(hello: frames.Hello, peer: frames.Hello) -> None:
    """Raises Mismatch, with the difference, unless version and settings are equal."""
    if hello.version != peer.version:
        raise Mismatch(
            f"{peer.cluster} runs nebula_jax {printable.line(peer.version, SHOWN)},"
            f" {hello.cluster} {printable.line(hello.version, SHOWN)}"
        )
    for name in sorted(hello.settings.keys() | peer.settings.keys()):
        here, there = hello.settings.get(name), peer.settings.get(name)
        if here != there:
            name = printable.line(name, SHOWN)
            raise Mismatch(
                f"{peer.cluster} has {name}={printable.line(there, SHOWN)},"
                f" {hello.cluster} has {name}={printable.line(here, SHOWN)}"
            )


Check = Callable[[frames.Hello], None]
"""Given the peer's Hello, raises Mismatch if it differs from this side's in what only
the caller can compare. Both sides should have it, so that each reports what it finds,
however soon the other one leaves."""


def no_further_check(peer: frames.Hello) -> None:
    """Compares nothing but versions and settings."""


Route = Callable[[float], tuple[socket.socket, str]]
"""Given seconds, makes a TCP connection that leads to the listener; returns it, and the
name that the listener's certificate must carry. Raises ConnectError if no other attempt
can be any better, and OSError."""


def directly(address: tuple[str, int], peer: str) -> Route:
    """Returns the route to a listener of the name `peer` by its own address."""

    def route(seconds: float) -> tuple[socket.socket, str]:
        try:
            return socket.create_connection(address, seconds), names_lib.label(peer)
        except UnicodeError:
            raise ConnectError(f"{endpoints.written(address)} is no address") from None

    return route


def connect(
    address: tuple[str, int],
    hello: frames.Hello,
    *,
    connect_timeout: float,
    peer_timeout: float,
    reconnect_timeout: float,
    peer: str,
    tls: Callable[[], ssl.SSLContext] | None = None,
    line: wan.Line = wan.UNSHAPED,
    log: Callable[[str], None] = print,
    check: Check = no_further_check,
    work: activity.Work | None = None,
    route: Route | None = None,
    place: str = "",
    finish: greeting.Finish = greeting.inside_tls,
) -> Link:
    """Connects to a listening cluster.

    Args:
      address: host and port, of the listener or of what leads to it.
      connect_timeout: seconds to keep trying for.
      peer_timeout: seconds of silence after which a connection counts as lost.
      reconnect_timeout: seconds that a lost connection may take to come back; 0 to
        give up at once.
      peer: the name that the listener's certificate must carry.
      tls: makes a client context (`security.tls`); None for plain TCP, which anybody
        can read and change.
      line: what to emulate for all that this side sends.
      log: called with a line when a connection breaks or comes back.
      check, finish: see `Check` and `greeting.Finish`.
      work: what this process does, as its peers see it.
      route: to the listener, if not `directly`.
      place: of the listener, in errors, if not its address.

    Returns a link whose peer has sent a Hello that agrees with this one. Raises
    NobodyThere if nobody answers in time; ConnectError if TLS fails for good; Mismatch
    if the peer's version or settings differ; session.PeerAborted, with its reason, if
    it refuses this cluster.
    """
    ours = secrets.token_bytes(SESSION_ID_BYTES)
    way, sign = route or directly(address, peer), greeting.call_sign(ours)
    dial = functools.partial(_dial, way, tls, finish, sign)
    session_ = session.Session(states.Role.CONNECTOR, ours, peer_timeout)
    session_.send(hello)
    silence = max(SILENT_SECONDS, min(peer_timeout, greeting.PENDING_SECONDS))
    attempt = functools.partial(_attempt, session_, dial, silence)
    where, jitter = (peer, place or endpoints.written(address)), random.Random(ours)
    connected = _rendezvous(attempt, where, connect_timeout, log, jitter)
    more: dict[str, Any] = {"line": line, "log": log, "dial": dial, "work": work}
    link = Link(session_, hello.cluster, reconnect_timeout=reconnect_timeout, **more)
    link.start(connected)
    greet(link, hello, check, connected)
    return link


def _rendezvous(
    attempt: Callable[[float], greeting.Connected],
    where: tuple[str, str],
    timeout: float,
    log: Callable[[str], None],
    jitter: random.Random,
) -> greeting.Connected:
    """Returns a connection on which the peer's Hello came; tries until one has."""
    peer, address = where
    begun, logged = time.monotonic(), ""
    deadline = begun + timeout
    while True:
        try:
            return attempt(deadline)
        except session.PeerAborted as error:
            text = f"{peer} at {address} refused this cluster: {error}"
            raise session.PeerAborted(text) from None
        except RETRIED as error:
            now = time.monotonic()
            what, reason = _explain(error, peer)
            if _is_final(error):
                raise ConnectError(f"{what} at {address}: {reason}") from None
            if now + RETRY_SECONDS > deadline:
                text = f"{what} at {address} after {timeout:g} s (connect_timeout)"
                absent = ConnectError if _is_tls(error) else NobodyThere
                raise absent(f"{text}: {reason}") from None
            line = f"{what} at {address}: {reason}; trying again"
            if what != NOBODY and line != logged:  # nobody: it has not started yet
                log(line)
                logged = line
        # Through a switch, each attempt is a request to all labs: the longer the peer
        # is awaited, the fewer there are. The last one is shortly before the deadline.
        pause = max(RETRY_SECONDS, WAITED_SHARE * (now - begun))
        pause = min(pause, reconnect.LONGEST_PAUSE) * jitter.uniform(0.5, 1.0)
        time.sleep(min(pause, deadline - RETRY_SECONDS / 2 - now))


def _attempt(
    session_: session.Session,
    dial: Callable[[float], greeting.Connected],
    silence: float,
    deadline: float,
) -> greeting.Connected:
    """Connects; waits for the peer's Hello until no byte has come for `silence` s."""
    connected = dial(deadline)
    sock = connected.sock
    try:
        session_.begin(time.monotonic(), connected.tags)
        steps = greeting.exchange_hellos(sock, session_)
        try:
            greeting.run(steps, sock, deadline, silence)
        except TimeoutError as error:
            if session_.is_running:  # its Open has come
                text = f"its Hello did not come: {error}"
                raise session.PeerGone(text) from None
            raise
    except BaseException:
        session_.lost()
        sock.close()
        raise
    return connected


def _explain(error: Exception, peer: str) -> tuple[str, str]:
    """Returns what there is not, and why."""
    if _is_tls(error):
        return f"no TLS with {peer}", tls_lib.in_words(error)
    if isinstance(error, OSError):
        return NOBODY, error.strerror or str(error)
    return f"no session with {peer}", str(error)


def _is_tls(error: Exception) -> bool:
    """Returns True for an error of TLS itself, not of the connection below it."""
    below = ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError
    return isinstance(error, ssl.SSLError) and not isinstance(error, below)


def _is_final(error: Exception) -> bool:
    """Returns True if only a person can mend it: one side's certificate is no good.

    Whatever else TLS reports may be damage on the way. What it reports of certificates
    is not: with TLS 1.3, they and the alerts about them come authenticated.
    """
    reason = getattr(error, "reason", None) or ""
    of_certificates = "CERTIFICATE" in reason or reason.endswith("UNKNOWN_CA")
    return isinstance(error, ssl.SSLCertVerificationError) or of_certificates


def _dial(
    route: Route,
    tls: Callable[[], ssl.SSLContext] | None,
    finish: greeting.Finish,
    call_sign: str,
    deadline: float,
) -> greeting.Connected:
    """Makes one attempt; it lasts as long as the peer's bytes come."""
    left = max(RETRY_SECONDS, deadline - time.monotonic())
    sock, name = route(min(SILENT_SECONDS, left))
    try:
        greeting.set_up(sock)
        if tls is None:
            return greeting.Connected(sock)
        context = tls()
        context.set_alpn_protocols([call_sign])
        sock = secure = context.wrap_socket(
            sock, server_hostname=name, do_handshake_on_connect=False
        )

        def steps() -> greeting.Steps[greeting.Connected]:
            yield from greeting.shake_hands(secure)
            return (yield from finish(secure))

        try:
            return greeting.run(steps(), sock, deadline, SILENT_SECONDS)
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            text = f"it closed the connection in the handshake ({error})"
            raise session.PeerGone(f"{text}; is tls off there?") from None
    except BaseException:
        sock.close()
        raise


def greet(
    link: Link,
    hello: frames.Hello,
    check: Check,
    connected: greeting.Connected | None = None,
) -> None:
    """Compares both Hellos, and any unchecked certificate; aborts if they differ."""
    try:
        check_agreement(hello, link.peer)
        if connected is not None:
            check_certificate(link.peer.cluster, connected)
        check(link.peer)
    except errors.NebulaError as error:
        link.abort(str(error))
        raise


def check_certificate(cluster: str, connected: greeting.Connected) -> None:
    """Raises Mismatch unless a peer's certificate lets it be the cluster that it is."""
    clusters = connected.clusters
    if clusters is not None and names_lib.label(cluster) not in clusters:
        owner = printable.line(connected.owner) or "nobody's DNS name"
        raise Mismatch(f"{cluster} shows a certificate for {owner}")
