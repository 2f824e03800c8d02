"""The things that an authority signs: certificates of itself and labs, and lists.

Functions of keys and times alone. A certificate of a lab serves on either side of a
connection, and its only DNS name is that of a lab's role; nothing else in it counts.
"""

import datetime
import secrets
from collections.abc import Iterable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from nebula_jax.security.tls import certificates
from nebula_jax.security.tls.certificates import Authority

AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
"""Longer than any federation: with another authority every lab would join anew."""
LEAF_LIFETIME = datetime.timedelta(days=5)
"""Certificates are a day old when they are renewed: so runs go on while the authority
is away for four days. A stolen key serves for so long, unless it is revoked."""
BACKDATED = datetime.timedelta(seconds=60)
"""Clocks of labs may be this far behind the authority's."""
LIST_LIFETIME = LEAF_LIFETIME
"""A lab that has had no newer revocation list for so long admits nobody. The list is
signed anew every day: it is the short-lived status of certificates that live longer."""


def authority(
    key: ec.EllipticCurvePrivateKey, lab: str, now: datetime.datetime
) -> Authority:
    """Makes an authority that signs no other authority.

    Args:
      key: of the authority.
      lab: that it belongs to; `member.issuing_lab` reads it.
      now: the time.
    """
    # With a part of its own: another authority of the lab is another issuer.
    name = certificates.name(f"authority {secrets.token_hex(8)}", lab)
    return certificates.authority(key, name, now - BACKDATED, now + AUTHORITY_LIFETIME)


def leaf(
    signer: Authority,
    key: Any,
    name: str,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.Certificate:
    """Makes a certificate of a lab.

    Args:
      signer: that issues it.
      key: the public key.
      name: its only DNS name, see `site_folder.dns_name`.
      now: the time.
      lifetime: from now on; not beyond the authority's.
    """
    end = min(now + lifetime, signer.certificate.not_valid_after_utc)
    subject, dns = certificates.name("lab"), x509.DNSName(name)
    return certificates.leaf(signer, key, subject, dns, now - BACKDATED, end)


def revocation_list(
    signer: Authority,
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
        .add_extension(certificates.identifier_of(signer), critical=False)
    )
    for serial, since in revoked:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(serial)
            .revocation_date(since)
            .build()
        )
    return builder.sign(signer.key, hashes.SHA256())
