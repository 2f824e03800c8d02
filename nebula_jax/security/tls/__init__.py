"""Mutual TLS between clusters (section 2.4, third mechanism).

The certificate's DNS name is the cluster's, such as `discriminator` or `generator-0`;
in a federation the lab's. `certificates` makes them, `credentials` checks them.
"""

import os
import pathlib
import re
import ssl
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives import serialization

from nebula_jax.security.tls import credentials

LEVEL = "DEFAULT:@SECLEVEL=2"  # of OpenSSL: refuses keys and digests that can be broken
DER = serialization.Encoding.DER


def server_contexts(
    folder: pathlib.Path, cluster: str | None = None
) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a server context from the folder's present files.

    Make one per connection: a context that lived longer would resume sessions, and
    admit a peer revoked in the meantime. For arguments and errors see
    `credentials.load`.
    """
    return _contexts(ssl.PROTOCOL_TLS_SERVER, folder, cluster)


def client_contexts(
    folder: pathlib.Path, cluster: str | None = None
) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a client context; see `server_contexts`."""
    return _contexts(ssl.PROTOCOL_TLS_CLIENT, folder, cluster)


def _contexts(
    side: int, folder: pathlib.Path, cluster: str | None
) -> Callable[[], ssl.SSLContext]:
    credentials.load(folder, cluster)  # fail at start, not at the first peer
    return lambda: context(side, credentials.load(folder, cluster))


class Context(ssl.SSLContext):
    """A context that has its own certificate at hand, which `ssl` does not hand out."""

    certificate = b""  # DER


def context(side: int, own: credentials.Credentials) -> Context:
    """Makes the context of one connection, which both sides show certificates on.

    It trusts only the authority of `own`, which was checked. `side` is
    ssl.PROTOCOL_TLS_SERVER or ssl.PROTOCOL_TLS_CLIENT.
    """
    made = bare_context(side)
    made.certificate = own.certificate.public_bytes(DER)
    made.verify_mode = ssl.CERT_REQUIRED
    if side == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # no session is resumed
    made.load_verify_locations(cadata=own.authority.public_bytes(DER))
    descriptor = credentials.in_memory(own.pem)  # as it was checked: it is replaced
    try:
        made.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return made


def bare_context(side: int) -> Context:
    """Makes a context that trusts nobody yet; for the argument see `context`.

    It has TLS 1.3, which the other end has too: every Python that runs this has it. The
    paper's 1.2 shows certificates, has weak ciphers, and renegotiates.
    """
    made = Context(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.set_ciphers(LEVEL)
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def own_certificate(sock: ssl.SSLSocket) -> bytes:
    """Returns the certificate (DER) that this side of a connection has shown."""
    assert isinstance(sock.context, Context)  # who needs it makes such a context
    return sock.context.certificate


def certificate_names(sock: ssl.SSLSocket) -> frozenset[str]:
    """Returns the DNS names of the peer's certificate."""
    certificate: Any = sock.getpeercert()  # each key has values of another type
    found = certificate.get("subjectAltName", ())
    return frozenset(value for kind, value in found if kind == "DNS")


_MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": "this side does not trust the peer's certificate",
    "CERTIFICATE_EXPIRED": "this side's certificate has expired, by the peer's clock",
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
