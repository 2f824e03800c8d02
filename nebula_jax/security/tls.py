"""Mutual TLS between clusters (section 2.4, third mechanism).

A folder of credentials holds `ca.pem`, the authority both sides trust, and `cert.pem`
with `key.pem`, this cluster's own. The certificate's DNS name is the cluster's:
`discriminator`, `generator-0`.
"""

import os
import pathlib
import ssl
from collections.abc import Callable, Iterable

import trustme

from nebula_jax import errors


def server_contexts(folder: pathlib.Path) -> Callable[[], ssl.SSLContext]:
    """Makes a fresh server context per call.

    One per connection: a context that lived longer would resume sessions, and let a
    peer in again whose certificate was revoked in the meantime.

    Raises:
      errors.NebulaError: if the folder's files cannot be used.
    """
    _load(ssl.PROTOCOL_TLS_SERVER, folder)  # fail at start, not at the first peer
    return lambda: _load(ssl.PROTOCOL_TLS_SERVER, folder)


def client_contexts(folder: pathlib.Path) -> Callable[[], ssl.SSLContext]:
    """Makes a client context per call, of the folder's files as they are then.

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
    """`generator:0` -> `generator-0`, which a certificate can carry."""
    return cluster.replace(":", "-")


def issue_for_run(folder: pathlib.Path, clusters: Iterable[str]) -> None:
    """Makes a throw-away authority and credentials for the clusters of one run.

    For clusters on one machine and for tests: the authority's own key is forgotten.

    Args:
      folder: gets one sub-folder per cluster, readable by this user only.
      clusters: their names.
    """
    authority = trustme.CA()
    for cluster in clusters:
        name = certificate_name(cluster)
        own = folder / name
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        certificate = authority.issue_cert(name)
        authority.cert_pem.write_to_path(own / "ca.pem")
        certificate.cert_chain_pems[0].write_to_path(own / "cert.pem")
        key = os.open(own / "key.pem", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(key, "wb") as stream:
            stream.write(certificate.private_key_pem.bytes())
