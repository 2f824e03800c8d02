"""Mutual TLS between clusters (section 2.4, third mechanism).

A folder of credentials holds `ca.pem`, the authority both sides trust, and `cert.pem`
with `key.pem` of this cluster. The certificate's DNS name is the cluster's, such as
`discriminator` or `generator-0`. `certificates` issues them, `credentials` checks them.
"""

import pathlib
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any

from nebula_jax.security.tls import credentials


def server_contexts(
    folder: pathlib.Path, cluster: str | None = None
) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a server context from the folder's present files.

    Make one per connection: a context that lived longer would resume sessions, and
    admit a peer whose certificate was revoked in the meantime.

    Args:
      folder: of credentials; see `credentials.files`.
      cluster: whose they are to be; None for anybody's.

    Raises:
      credentials.CredentialsError: if they must not be used.
    """
    return _contexts(ssl.PROTOCOL_TLS_SERVER, folder, cluster)


def client_contexts(
    folder: pathlib.Path, cluster: str | None = None
) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a client context from the folder's present files.

    It trusts only the folder's authority, and shows the folder's certificate. For the
    arguments see `server_contexts`.

    Raises:
      credentials.CredentialsError: if they must not be used.
    """
    return _contexts(ssl.PROTOCOL_TLS_CLIENT, folder, cluster)


class Context(ssl.SSLContext):
    """A context that has its own certificate at hand, which `ssl` does not hand out."""

    certificate = b""
    """DER."""


def own_certificate(sock: ssl.SSLSocket) -> bytes:
    """Returns the certificate (DER) that this side of a connection has shown."""
    assert isinstance(sock.context, Context)  # who needs it makes such a context
    return sock.context.certificate


def certificate_names(sock: socket.socket) -> set[str] | None:
    """Returns the DNS names of the peer's certificate; None without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    certificate: Any = sock.getpeercert()  # each key has values of another type
    names = certificate.get("subjectAltName", ())
    return {value for kind, value in names if kind == "DNS"}


_MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": "this side does not trust the peer's certificate",
    "ALERT.*CERTIFICATE|UNKNOWN_CA": "the peer does not trust this side's certificate",
    "BAD_RECORD_MAC|DECRYPT|DIGEST": "bytes were changed on their way",
    "EOF": "the peer, or the line, closed the connection in the middle of TLS",
    "WRONG_VERSION|HTTP_REQUEST": "what came is no TLS: is tls off at the peer?",
    "PROTOCOL": "the two sides have no version of TLS in common",
}
"""A pattern in OpenSSL's words -> what they mean; the first that fits counts."""


def in_words(error: BaseException) -> str:
    """Returns an error's text, with a sentence before the words of OpenSSL.

    >>> in_words(ssl.SSLError(1, "[SSL: SSLV3_ALERT_BAD_RECORD_MAC] (_ssl.c:2590)"))
    'bytes were changed on their way ([SSL: SSLV3_ALERT_BAD_RECORD_MAC] (_ssl.c:2590))'
    """
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    text = error.strerror or str(error)
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, text):
            return f"{meaning} ({text})"
    return f"TLS failed ({text})"


def _contexts(
    side: int, folder: pathlib.Path, cluster: str | None
) -> Callable[[], ssl.SSLContext]:
    _load(side, folder, cluster)  # fail at start, not at the first peer
    return lambda: _load(side, folder, cluster)


def _load(side: int, folder: pathlib.Path, cluster: str | None) -> ssl.SSLContext:
    files = credentials.check(folder, cluster)
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the paper's; 1.3 is negotiated
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.verify_mode = ssl.CERT_REQUIRED
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session must not be resumed
    try:
        context.load_verify_locations(files.authority)
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise credentials.CredentialsError(
            f"tls={folder}: OpenSSL does not take ca.pem, cert.pem, key.pem: {error}"
        ) from None
    return context
