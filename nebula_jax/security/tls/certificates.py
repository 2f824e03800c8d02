"""Certificates of the clusters of one run: an authority, and a certificate for each.

Keys are on the curve P-256. A cluster's certificate serves on either side of a
connection, since a cluster may listen and connect; its DNS name is the cluster's, and
nothing else in it counts. It is valid for LIFETIME from a day before it was issued.
"""

import datetime
import os
import pathlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nebula_jax.security import names
from nebula_jax.security.tls.credentials import USAGES

LIFETIME = datetime.timedelta(days=365)
"""Longer than any run: nobody can renew a certificate, as the authority's key is not
kept, and a run whose certificates expire cannot reconnect. Short enough that a stolen
key does not serve for ever."""

CLOCK_DIFFERENCE = datetime.timedelta(days=1)
"""Clocks of clusters may be this far behind the one that issued the certificates."""


class Authority(NamedTuple):
    """A certificate authority and its private key, which is never written."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class Credentials(NamedTuple):
    """The contents of ca.pem, cert.pem and key.pem of one cluster."""

    authority: bytes
    certificate: bytes
    key: bytes


def new_authority() -> Authority:
    """Makes an authority that signs certificates of clusters and no other authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: a certificate of another authority has an unknown issuer.
    name = _name(f"authority {secrets.token_hex(8)}")
    certificate = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def issue(authority: Authority, name: x509.GeneralName) -> Credentials:
    """Issues a certificate with a new key.

    Args:
      authority: that signs it.
      name: its only subject alternative name; `x509.DNSName` for a cluster.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject
    certificate = (
        _certificate(_name("cluster"), issuer, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(USAGES),
            critical=True,
        )
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(
                authority.key.public_key()
            ),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return Credentials(
        authority.certificate.public_bytes(serialization.Encoding.PEM),
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def write(folder: pathlib.Path, credentials: Credentials) -> None:
    """Writes ca.pem, cert.pem and key.pem; folder and key are for this user only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "ca.pem").write_bytes(credentials.authority)
    (folder / "cert.pem").write_bytes(credentials.certificate)
    key = os.open(folder / "key.pem", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(key, "wb") as stream:
        stream.write(credentials.key)


def issue_all(clusters: Iterable[str]) -> dict[str, Credentials]:
    """Makes a new authority and credentials for the clusters of one run.

    The authority's key is not kept: no cluster can be added later.

    Args:
      clusters: their names.

    Raises:
      errors.SettingsError: if one of them is no cluster's name, or two are too alike.
    """
    clusters = list(clusters)
    names.check(clusters)
    authority = new_authority()
    return {
        cluster: issue(authority, x509.DNSName(names.label(cluster)))
        for cluster in clusters
    }


def issue_for_run(folder: pathlib.Path, clusters: Iterable[str]) -> None:
    """Writes the credentials of `issue_all`.

    Args:
      folder: gets one sub-folder per cluster, named after its certificate.
      clusters: their names.

    Raises:
      errors.SettingsError: see `issue_all`; nothing is written.
    """
    for cluster, credentials in issue_all(clusters).items():
        write(folder / names.label(cluster), credentials)


def _name(unit: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Nebula-JAX"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
        ]
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def key_usage(signs_certificates: bool) -> x509.KeyUsage:
    """Restricts a key to signing certificates and lists of them, or TLS handshakes.

    Args:
      signs_certificates: whether it is an authority's.
    """
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
