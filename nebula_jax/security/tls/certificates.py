"""Certificates of an authority and of those that it issues for, and their files.

For the clusters of one run an authority and a certificate each are made at once
(`issue_for_run`), and its key is not kept. A federation's authority keeps its key
(`membership/authority.py`). Keys are on the curve P-256. A certificate serves on either
side of a connection, since its owner may listen and connect; its DNS name is the
owner's, and nothing else in it counts.
"""

import datetime
import os
import pathlib
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

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
    """The certificate of an authority, and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class Credentials(NamedTuple):
    """The contents of ca.pem, cert.pem and key.pem."""

    authority: bytes
    certificate: bytes
    key: bytes


def authority(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> Authority:
    """Makes an authority that signs no other authority."""
    builder = _builder(subject, subject, key.public_key(), begin, end)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(key_usage(signs_certificates=True), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def leaf(
    signer: Authority,
    key: Any,
    subject: x509.Name,
    name: x509.GeneralName,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.Certificate:
    """Makes a certificate that signs nothing.

    Args:
      subject: which does not count.
      name: its only subject alternative name; `x509.DNSName` of its owner.
    """
    builder = _builder(subject, signer.certificate.subject, key, begin, end)
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    return (
        builder.add_extension(constraints, critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(USAGES), critical=True)
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .add_extension(identifier_of(signer), critical=False)
        .sign(signer.key, hashes.SHA256())
    )


def name(unit: str, lab: str | None = None) -> x509.Name:
    """Returns the subject of a certificate; `lab` is that of an authority."""
    parts = {
        NameOID.ORGANIZATION_NAME: "Nebula-JAX",
        NameOID.ORGANIZATIONAL_UNIT_NAME: unit,
        **({NameOID.COMMON_NAME: lab} if lab else {}),
    }
    return x509.Name([x509.NameAttribute(*part) for part in parts.items()])


def identifier_of(signer: Authority) -> x509.AuthorityKeyIdentifier:
    """Returns what names the key of an authority in all that it signs."""
    public: Any = signer.certificate.public_key()  # an authority's key can sign
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(public)


def new_authority() -> Authority:
    """Makes an authority for the clusters of one run."""
    # A name of its own: a certificate of another authority has an unknown issuer.
    subject = name(f"authority {secrets.token_hex(8)}")
    return authority(ec.generate_private_key(ec.SECP256R1()), subject, *_period())


def issue(signer: Authority, owner: x509.GeneralName) -> Credentials:
    """Issues a certificate with a new key; `owner` is a cluster's `x509.DNSName`."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = leaf(signer, key.public_key(), name("cluster"), owner, *_period())
    pem = serialization.Encoding.PEM
    return Credentials(
        signer.certificate.public_bytes(pem), made.public_bytes(pem), key_pem(key)
    )


def key_pem(key: Any) -> bytes:
    """Returns a private key as it is written (PEM)."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def write(folder: pathlib.Path, credentials: Credentials) -> None:
    """Writes ca.pem, cert.pem and key.pem; folder and key are for this user only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "ca.pem").write_bytes(credentials.authority)
    (folder / "cert.pem").write_bytes(credentials.certificate)
    write_key(folder / "key.pem", credentials.key)


def write_key(path: pathlib.Path, contents: bytes) -> None:
    """Writes a private key, for this user only."""
    key = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(key, "wb") as stream:
        stream.write(contents)


def issue_all(clusters: Iterable[str]) -> dict[str, Credentials]:
    """Makes a new authority and credentials for the clusters of one run.

    The authority's key is not kept: no cluster can be added later.

    Raises:
      errors.SettingsError: if one of them is no cluster's name, or two are too alike.
    """
    clusters = list(clusters)
    names.check(clusters)
    signer = new_authority()
    return {
        cluster: issue(signer, x509.DNSName(names.label(cluster)))
        for cluster in clusters
    }


def issue_for_run(folder: pathlib.Path, clusters: Iterable[str]) -> None:
    """Writes the credentials of `issue_all`.

    Args:
      folder: gets one sub-folder per cluster, named after its certificate.

    Raises:
      errors.SettingsError: see `issue_all`; nothing is written.
    """
    for cluster, credentials in issue_all(clusters).items():
        write(folder / names.label(cluster), credentials)


def _period() -> tuple[datetime.datetime, datetime.datetime]:
    """Returns begin and end of a certificate of a run that is made now."""
    now = datetime.datetime.now(datetime.UTC)
    return now - CLOCK_DIFFERENCE, now + LIFETIME


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def key_usage(signs_certificates: bool) -> x509.KeyUsage:
    """Restricts a key to signing certificates, or TLS handshakes."""
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
