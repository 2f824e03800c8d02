"""The cross-cluster boundary: how a cluster comes to one that listens.

    with bridge.connect(address, hello, ...) as link:
        tokens = link.sender("tokens", spec, codecs.pack_ids(vocab_size))
        step = link.wait_for_welcome(timeout)
        tokens.send(step + 1, arrays)      # encode on device -> frames -> socket
        link.wait_for_step(step + 1)

A Link (see `link`) is one conversation. The other side of it is in `listener`; both
compare their Hellos, and part with an error that names the difference.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.security import credentials, names

RETRY_SECONDS = 0.2  # between attempts to connect
REDIAL_SECONDS = 5.0  # for one attempt to come back


class ConnectError(errors.NebulaError):
    """A connection that could not be made."""


class Mismatch(errors.NebulaError):
    """A difference between the settings of two clusters."""


def check_agreement(hello: frames.Hello, peer: frames.Hello) -> None:
    """Raises Mismatch, with the difference, unless version and settings are equal.

    Args:
      hello: this side's.
      peer: the other side's.
    """
    if hello.version != peer.version:
        raise Mismatch(
            f"{peer.cluster} runs nebula_jax {peer.version},"
            f" {hello.cluster} {hello.version}"
        )
    for name in sorted(hello.settings.keys() | peer.settings.keys()):
        here, there = hello.settings.get(name), peer.settings.get(name)
        if here != there:
            raise Mismatch(
                f"{peer.cluster} has {name}={_brief(there)},"
                f" {hello.cluster} has {name}={_brief(here)}"
            )


def written(address: tuple[str, int]) -> str:
    """Returns an address as one writes it: `example.org:7070`, `[::1]:7070`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def no_further_check(peer: frames.Hello) -> None:
    """Compares nothing but versions and settings."""


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
    check: Callable[[frames.Hello], None] = no_further_check,
    work: activity.Work | None = None,
) -> Link:
    """Connects to a listening cluster.

    Args:
      address: host and port.
      hello: this side's.
      connect_timeout: seconds to keep trying for.
      peer_timeout: seconds of silence after which a connection counts as lost.
      reconnect_timeout: seconds that a lost connection may take to come back; 0 to
        give up at once.
      peer: the name that the listener's certificate must carry.
      tls: makes a client context, see `security.tls`; None for plain TCP, which
        anybody can read and change.
      line: what to emulate for all that this side sends.
      log: called with a line when a connection breaks or comes back.
      check: given the peer's Hello; raises Mismatch if it differs from this side's in
        what only the caller can compare. To be given on both sides, so that each
        reports what it finds, however soon the other one leaves.
      work: what this process does: peers are patient accordingly.

    Returns:
      A link whose peer has sent a Hello that agrees with this one.

    Raises:
      ConnectError: if nobody answers, or TLS fails.
      Mismatch: if the peer's version or settings differ.
    """
    deadline = time.monotonic() + connect_timeout
    sock = _dial(address, peer, tls, deadline, connect_timeout)
    link = Link(
        states.Role.CONNECTOR,
        hello,
        peer_timeout=peer_timeout,
        reconnect_timeout=reconnect_timeout,
        line=line,
        log=log,
        dial=lambda: _dial(address, peer, tls, time.monotonic() + REDIAL_SECONDS, 0.0),
        work=work,
    )
    link.start(sock)
    greet(link, hello, max(RETRY_SECONDS, deadline - time.monotonic()), check)
    return link


def _dial(
    address: tuple[str, int],
    peer: str,
    tls: Callable[[], ssl.SSLContext] | None,
    deadline: float,
    patience: float,
) -> socket.socket:
    """Returns a connected socket; tries for `patience` seconds if nobody answers."""
    where = written(address)
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
            return shake_hands(sock, time.monotonic() + timeout)
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


def shake_hands(sock: ssl.SSLSocket, deadline: float) -> ssl.SSLSocket:
    """Completes a TLS handshake by a deadline, however slowly the peer sends.

    Raises:
      credentials.CredentialsError: if the peer's certificate must not be used.
      OSError: if there was no handshake; ssl.SSLError is one.
    """
    sock.setblocking(False)
    poller = select.poll()
    while True:
        try:
            sock.do_handshake()
            credentials.check_peer(sock.getpeercert(True) or b"")
            return sock
        except ssl.SSLWantReadError:
            poller.register(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poller.register(sock, select.POLLOUT)
        if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the TLS handshake took too long")


def greet(
    link: Link,
    hello: frames.Hello,
    timeout: float,
    check: Callable[[frames.Hello], None],
) -> None:
    """Waits for the peer's Hello and compares it; aborts the link if it differs."""
    try:
        link.wait_for_hello(timeout)
        check_agreement(hello, link.peer)
        _check_certificate(link)
        check(link.peer)
    except errors.NebulaError as error:
        link.abort(str(error))
        raise


def _check_certificate(link: Link) -> None:
    """Raises Mismatch if, with TLS, the peer's certificate has another name than it."""
    there = link.certificate_names
    if there is not None and names.label(link.peer.cluster) not in there:
        owner = ", ".join(sorted(there)) or "nobody's DNS name"
        raise Mismatch(f"{link.peer.cluster} shows a certificate for {owner}")
