"""The things that an authority signs: certificates of itself and labs, and lists.

Functions of keys and times alone. A certificate of a lab serves on either side of a
connection, and its only DNS name is that of a lab's role; nothing else in it counts.
"""

import datetime
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nebula_jax.security.tls import certificates, credentials

AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
"""Longer than any federation: with another authority every lab would join anew."""
LEAF_LIFETIME = datetime.timedelta(hours=24)
"""A stolen key serves no longer. Two thirds of it are a working day and a night."""
BACKDATED = datetime.timedelta(seconds=60)
"""Clocks of labs may be this far behind the authority's."""
LIST_LIFETIME = datetime.timedelta(days=7)
"""A lab that has had no newer revocation list for so long admits nobody."""


class Signer(NamedTuple):
    """An authority's certificate and its key."""

    certificate: x509.Certificate
    key: Any


def authority_certificate(
    key: ec.EllipticCurvePrivateKey, lab: str, now: datetime.datetime
) -> x509.Certificate:
    """Makes the certificate of an authority that signs no other authority.

    Args:
      key: of the authority.
      lab: that it belongs to; `member.issuing_lab` reads it.
      now: the time.
    """
    # With a part of its own: another authority of the lab is another issuer.
    name = _name(f"authority {secrets.token_hex(8)}", lab)
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    return (
        _builder(name, name, public, now - BACKDATED, now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(certificates.key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def leaf(
    signer: Signer,
    key: Any,
    name: str,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.Certificate:
    """Makes a certificate of a lab.

    Args:
      signer: that issues it.
      key: the public key.
      name: its only DNS name, see `federation.dns_name`.
      now: the time.
      lifetime: from now on; not beyond the authority's.
    """
    issuer = signer.certificate
    end = min(now + lifetime, issuer.not_valid_after_utc)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    return (
        _builder(_name("lab"), issuer.subject, key, now - BACKDATED, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(certificates.key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(credentials.USAGES), critical=True)
        .add_extension(names, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(_identifier_of(issuer), critical=False)
        .sign(signer.key, hashes.SHA256())
    )


def revocation_list(
    signer: Signer,
    number: int,
    revoked: Iterable[tuple[int, datetime.datetime]],
    now: datetime.datetime,
) -> x509.CertificateRevocationList:
    """Makes a revocation list.

    Args:
      signer: that issues it.
      number: greater than that of the list before.
      revoked: serial numbers, and since when.
      now: the time.
    """
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.certificate.subject)
        .last_update(now - BACKDATED)
        .next_update(now + LIST_LIFETIME)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_identifier_of(signer.certificate), critical=False)
    )
    for serial, since in revoked:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(serial)
            .revocation_date(since)
            .build()
        )
    return builder.sign(signer.key, hashes.SHA256())


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
    )


def _name(unit: str, lab: str | None = None) -> x509.Name:
    parts = [
        (NameOID.ORGANIZATION_NAME, "Nebula-JAX"),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
    ]
    if lab:
        parts.append((NameOID.COMMON_NAME, lab))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts])


def _identifier_of(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key: Any = authority.public_key()  # an authority's key can sign
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
