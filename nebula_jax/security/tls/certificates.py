"""Certificates of an authority and of those that it issues for.

For the clusters of one run an authority and a certificate each are made at once
(`issue_for_run`), and its key is not kept. A federation's authority keeps its key
(`membership/authority.py`). Keys are on the curve P-256. A certificate serves on either
side of a connection, since its owner may listen and connect; its DNS name is the
owner's, and nothing else in it counts.
"""

import datetime
import json
import pathlib
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from nebula_jax.security import names, private_files
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import credentials

LIFETIME = datetime.timedelta(days=90)
"""Longer than any run: nobody can renew a certificate, as the authority's key is not
kept, and a run whose certificates expire cannot reconnect. No longer, since nobody can
revoke one: in a federation, each lasts five days."""
CLOCK_DIFFERENCE = datetime.timedelta(days=1)  # a cluster's clock may be so far behind

LOG_KEY = x509.ObjectIdentifier("2.25.226310164853811704157937265498204158273")
"""The extension of an authority: the key of the log that has all it issues."""
RECEIPT = x509.ObjectIdentifier("2.25.226310164853811704157937265498204158274")
"""The extension of a certificate: the signature of that log, see `facts`."""
_OCTET_STRING = 0x04  # of DER; its length is one byte up to 127


class Authority(NamedTuple):
    """The certificate of an authority, and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def authority(
    begin: datetime.datetime,
    end: datetime.datetime,
    lab: str | None = None,
    log_key: bytes = b"",
    root: Authority | None = None,
) -> Authority:
    """Makes an authority, with a new key.

    `lab` is whose it is; None for the clusters of one run. `log_key` is of the log that
    has all that is issued (Ed25519, 32 bytes), for a root, which signs other
    authorities and nothing else; b"" for another. `root` signs it; None if it signs
    itself.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: a certificate of another authority has an unknown issuer.
    subject = name(f"authority {secrets.token_hex(8)}", lab)
    issuer = root.certificate.subject if root else subject
    builder = _builder(subject, issuer, key.public_key(), begin, end)
    constraints = x509.BasicConstraints(ca=True, path_length=1 if log_key else 0)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(key_usage(signs_certificates=True), critical=True)
    builder = _with(builder, LOG_KEY, log_key)
    if root:
        builder = builder.add_extension(identifier_of(root), critical=False)
    return Authority(builder.sign(root.key if root else key, hashes.SHA256()), key)


def leaf(
    signer: Authority,
    key: Any,
    owner: x509.GeneralName,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.Certificate:
    """Makes a certificate that signs nothing.

    `owner` is its only subject alternative name: `x509.DNSName` of a cluster or lab.
    """
    builder = _builder(name("member"), signer.certificate.subject, key, begin, end)
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    return (
        builder.add_extension(constraints, critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(credentials.USAGES), critical=True)
        .add_extension(x509.SubjectAlternativeName([owner]), critical=True)
        .add_extension(identifier_of(signer), critical=False)
        .sign(signer.key, hashes.SHA256())
    )


def with_receipt(
    signer: Authority, made: x509.Certificate, receipt: bytes
) -> x509.Certificate:
    """Makes a certificate anew, with a receipt; raises ValueError if it had one."""
    builder = x509.CertificateBuilder(
        made.issuer,
        made.subject,
        made.public_key(),
        made.serial_number,
        made.not_valid_before_utc.replace(tzinfo=None),
        made.not_valid_after_utc.replace(tzinfo=None),
        list(made.extensions),
    )
    return _with(builder, RECEIPT, receipt).sign(signer.key, hashes.SHA256())


def facts(certificate: x509.Certificate) -> bytes:
    """Returns what a log signs in the receipt of a certificate.

    That is whose it is, its key, its number and its life: the same before and after the
    receipt is in it, as with the precertificates of RFC 6962.
    """
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    key = certificate.public_key().public_bytes(serialization.Encoding.DER, form)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    life = [int(each.timestamp()) for each in (begin, end)]
    names_there, number = credentials.names_of(certificate), certificate.serial_number
    said = ["nebula receipt 1", names_there, key.hex(), f"{number:x}", life]
    return json.dumps(said).encode()


def is_logged(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Returns True if its authority's log has signed it; raises one of UNREADABLE."""
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(log_key_of(authority))
        key.verify(_value(certificate, RECEIPT), facts(certificate))
    except (ValueError, exceptions.InvalidSignature):
        return False
    return True


def log_key_of(authority: x509.Certificate) -> bytes:
    """Returns the key of the log that has all that a root's authorities issue.

    That is 32 bytes of Ed25519, and b"" for an authority that is no root.
    """
    return _value(authority, LOG_KEY)


def _with(
    builder: x509.CertificateBuilder, kind: x509.ObjectIdentifier, value: bytes
) -> x509.CertificateBuilder:
    """Returns a builder with a short value (an OCTET STRING) of ours, if it has any."""
    if not value:
        return builder
    coded = bytes([_OCTET_STRING, len(value)]) + value
    return builder.add_extension(x509.UnrecognizedExtension(kind, coded), False)


def _value(certificate: x509.Certificate, kind: x509.ObjectIdentifier) -> bytes:
    """Returns what `_with` has put into a certificate; b"" if that is nothing."""
    try:
        found: Any = certificate.extensions.get_extension_for_oid(kind).value
    except x509.ExtensionNotFound:
        return b""
    return bytes(found.value[2:])


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


def pem(key: Any, *chain: x509.Certificate) -> bytes:
    """Returns a key and certificates (PEM), as a file of credentials has them."""
    coding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    own = key.private_bytes(coding, form, serialization.NoEncryption())
    return b"".join([own, *(each.public_bytes(coding) for each in chain)])


def issue_all(clusters: Iterable[str]) -> dict[str, bytes]:
    """Makes a new authority and credentials (PEM) for the clusters of one run.

    Its key is not kept: none can be added later. For errors see `names.check`.
    """
    clusters = list(clusters)
    names.check(clusters)
    now = site_folder.utc_now()
    life = now - CLOCK_DIFFERENCE, now + LIFETIME
    signer, made = authority(*life), {}
    for cluster in clusters:
        key, owner = ec.generate_private_key(ec.SECP256R1()), names.label(cluster)
        own = leaf(signer, key.public_key(), x509.DNSName(owner), *life)
        made[cluster] = pem(key, own, signer.certificate)
    return made


def issue_for_run(folder: pathlib.Path, clusters: Iterable[str]) -> None:
    """Writes the credentials of `issue_all`, for this user alone.

    `folder` gets one sub-folder per cluster, named after its certificate. Raises
    errors.SettingsError as `issue_all`, and nothing is written; errors.NebulaError if
    the disk does not take it.
    """
    for cluster, made in issue_all(clusters).items():
        own = folder / names.label(cluster)
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        private_files.write(own / credentials.FILE, made.decode())


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
