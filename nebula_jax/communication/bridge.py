"""THE cross-cluster boundary: how clusters meet.

    with bridge.connect(address, hello, ...) as link:
        tokens = link.sender("tokens", spec, codecs.pack_ids(vocab_size))
        step = link.wait_for_welcome()
        tokens.send(step + 1, arrays)      # encode on device -> frames -> socket
        link.wait_for_step(step + 1)

A Link (see `link`) is one conversation; here is how two clusters come to have one.
"""

import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from nebula_jax import errors
from nebula_jax.communication import frames, protocol, wan
from nebula_jax.communication.link import Link
from nebula_jax.security import tls as tls_lib

HANDSHAKE_SECONDS = 5.0  # an accepted connection says Hello within this, or is dropped
RETRY_SECONDS = 0.2  # between attempts to connect


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


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def connect(
    address: tuple[str, int],
    hello: frames.Hello,
    *,
    connect_timeout: float,
    peer_timeout: float,
    peer: str,
    tls: ssl.SSLContext | None = None,
    line: wan.Line = wan.UNSHAPED,
) -> Link:
    """Comes to a listening cluster.

    Args:
      address: host and port.
      hello: this side's.
      connect_timeout: seconds to keep trying for.
      peer_timeout: seconds of silence after which the peer counts as gone.
      peer: the name that the listener's certificate must carry.
      tls: client context, or None for plain TCP.
      line: what to emulate.

    Returns:
      A link whose peer has said a Hello that agrees with ours.

    Raises:
      ConnectError: if nobody answers, or TLS fails.
      Mismatch: if the peer runs something else.
    """
    deadline = time.monotonic() + connect_timeout
    where = f"{address[0]}:{address[1]}"
    while True:
        try:
            sock = socket.create_connection(address, timeout=connect_timeout)
            break
        except UnicodeError:
            raise ConnectError(f"{where} is no address") from None
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise ConnectError(
                    f"nobody answers at {where} after {connect_timeout:g} s"
                    f" (--connect_timeout): {error.strerror or error}"
                ) from None
            time.sleep(RETRY_SECONDS)
    try:
        sock.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=peer)
    except (OSError, ssl.CertificateError) as error:
        sock.close()
        raise ConnectError(f"no TLS with {peer} at {where}: {error}") from None
    remaining = max(RETRY_SECONDS, deadline - time.monotonic())
    link = Link(sock, protocol.Role.CONNECTOR, hello, peer_timeout, line)
    return _met(link, hello, remaining)


def accept(
    listening: socket.socket,
    hello: frames.Hello,
    *,
    timeout: float,
    peer_timeout: float,
    tls: Callable[[], ssl.SSLContext] | None = None,
    line: wan.Line = wan.UNSHAPED,
    log: Callable[[str], None] = print,
) -> Link:
    """Waits for a cluster to come.

    A stranger who does not speak the protocol is dropped, and waiting goes on.

    Args:
      listening: bound and listening socket.
      hello: this side's.
      timeout: seconds to wait.
      peer_timeout: seconds of silence after which the peer counts as gone.
      tls: makes a fresh server context per connection (a context kept for several
        would let a revoked peer resume its session), or None for plain TCP.
      line: what to emulate.
      log: told about dropped strangers.

    Returns:
      A link whose peer has said a Hello that agrees with ours.

    Raises:
      ConnectError: if nobody came in time.
      Mismatch: if the peer runs something else.
    """
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        listening.settimeout(remaining)
        try:
            sock, address = listening.accept()
        except TimeoutError:
            break
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            if tls is not None:
                sock = tls().wrap_socket(sock, server_side=True)
            link = Link(sock, protocol.Role.LISTENER, hello, peer_timeout, line)
            return _met(link, hello, HANDSHAKE_SECONDS)
        except Mismatch:
            raise
        except (OSError, errors.NebulaError) as error:
            sock.close()
            log(f"dropped a connection from {address[0]}: {error}")
    raise ConnectError(f"nobody came within {timeout:g} s (--connect_timeout)")


def _met(link: Link, hello: frames.Hello, timeout: float) -> Link:
    try:
        link.wait_for_hello(timeout)
        check_agreement(hello, link.peer)
        _check_certificate(link)
    except errors.NebulaError as error:
        link.abort(str(error))
        raise
    return link


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
