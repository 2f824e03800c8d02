"""Mutual TLS between clusters (section 2.4, third mechanism).

A folder of credentials holds `ca.pem`, the authority both sides trust, and `cert.pem`
with `key.pem` of this cluster. The certificate's DNS name is the cluster's, such as
`discriminator` or `generator-0`. `certificates` issues them.
"""

import pathlib
import ssl
from collections.abc import Callable

from nebula_jax import errors


def server_contexts(folder: pathlib.Path) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a server context from the folder's present files.

    Make one per connection: a context that lived longer would resume sessions, and
    admit a peer whose certificate was revoked in the meantime.

    Raises:
      errors.NebulaError: if the folder's files cannot be used.
    """
    _load(ssl.PROTOCOL_TLS_SERVER, folder)  # fail at start, not at the first peer
    return lambda: _load(ssl.PROTOCOL_TLS_SERVER, folder)


def client_contexts(folder: pathlib.Path) -> Callable[[], ssl.SSLContext]:
    """Returns a function that makes a client context from the folder's present files.

    It trusts only the folder's authority, and shows the folder's certificate.

    Raises:
      errors.NebulaError: if the folder's files cannot be used.
    """
    _load(ssl.PROTOCOL_TLS_CLIENT, folder)
    return lambda: _load(ssl.PROTOCOL_TLS_CLIENT, folder)


def _load(side: int, folder: pathlib.Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the paper's; 1.3 is negotiated
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.verify_mode = ssl.CERT_REQUIRED
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session must not be resumed
    try:
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except (OSError, ssl.SSLError) as error:
        raise errors.NebulaError(
            f"--tls={folder}: needs ca.pem, cert.pem and key.pem: {error}"
        ) from None
    return context


def certificate_name(cluster: str) -> str:
    """Returns a cluster's DNS name: `generator:0` -> `generator-0`."""
    return cluster.replace(":", "-")
