"""Credentials: a key, its certificate, and the authority that both sides trust.

The three are one PEM file, for a cluster of a run (`cluster.pem`) as for the switch and
the trainers of a lab: whoever reads it once has parts that belong together. OpenSSL
checks that a peer's certificate comes from the authority and is valid at present; what
it lets pass is checked here, on either side alike.
"""

import datetime
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from nebula_jax import errors, installed
from nebula_jax.security import names, private_files
from nebula_jax.security.membership import site_folder

FILE = "cluster.pem"  # a cluster's, in the folder that is its setting `tls`
LONGEST_LIFETIME = datetime.timedelta(days=180)
"""A stolen key serves no longer. Twice what `certificates` issues."""
USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
"""The usages of a certificate: its owner may listen and connect."""
HASHES = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
"""Digests that a signature may be of; older ones can be forged."""
_DESCRIPTOR = re.compile(r"fd:([0-9]{1,9})")


class CredentialsError(site_folder.Refusal):
    """An error in credentials, of this side or of a peer: they must not be used."""


class NoCredentialsError(CredentialsError, errors.SettingsError):
    """A folder, named by a setting, that holds no credentials."""


class Credentials(NamedTuple):
    """The contents of a file of credentials."""

    pem: bytes  # all of it
    key: Any  # the private one of the certificate
    certificate: x509.Certificate
    between: Sequence[x509.Certificate]  # the issuing authority, if its root is trusted
    authority: x509.Certificate


def parse(pem: bytes) -> Credentials:
    """Reads credentials and checks nothing; raises one of site_folder.UNREADABLE."""
    key = serialization.load_pem_private_key(pem, None)
    certificate, *between, authority = x509.load_pem_x509_certificates(pem)
    return Credentials(pem, key, certificate, between, authority)


def file(where: pathlib.Path) -> pathlib.Path:
    """Returns the file of a cluster's credentials.

    `where` is its folder, or `fd:NUMBER`: a file in memory that the launcher hands
    down.
    """
    if found := _DESCRIPTOR.fullmatch(str(where)):
        return pathlib.Path("/proc/self/fd") / found[1]
    return where / FILE


def load(where: pathlib.Path, cluster: str | None = None) -> Credentials:
    """Reads the credentials of a cluster, and checks that it alone can use them.

    For `where` see `file`; `cluster` is whose they are to be, None for anybody's.
    Raises CredentialsError or private_files.PrivateFileError, in one line that names
    the file.
    """
    path = file(where)
    try:
        status = path.stat()
        found = parse(path.read_bytes())
    except (OSError, *site_folder.UNREADABLE) as error:
        text = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise NoCredentialsError(
            "missing",
            f"tls={where}: needs {FILE} as {installed.COMMAND}"
            f" scripts.issue_certificates makes it: {text[:200]}",
        ) from None
    private_files.check_mode(path, status)
    name = None if cluster is None else names.label(cluster)
    check(found, f"{path}: the certificate", name)
    return found


def check(own: Credentials, what: str, name: str | None) -> None:
    """Checks this side's credentials; raises CredentialsError if they must not be used.

    `what` is the certificate, in words; `name` its only DNS name, or None for any.
    """
    certificate = own.certificate
    chain = (certificate, *own.between, own.authority)
    try:
        for issued, issuer in itertools.pairwise(chain):
            issued.verify_directly_issued_by(issuer)
        found = names_of(certificate)
    except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
        raise CredentialsError(
            "unknown_authority", f"{what} was not issued by the authority beside it"
        ) from None
    if certificate.public_key() != own.key.public_key():
        raise CredentialsError("wrong_key", f"{what} is for another key")
    if name is not None and found != [name]:
        owner = ", ".join(found)[:200] or "nobody's DNS name"
        raise CredentialsError("wrong_name", f"{what} is for {owner}, not for {name}")
    for issuer in chain[1:]:
        _check_end(issuer, f"{what}'s authority")
    check_certificate(certificate, what)


def check_peer(
    der: bytes | None, longest: datetime.timedelta = LONGEST_LIFETIME
) -> tuple[x509.Certificate, list[str]]:
    """Checks a peer's certificate, which OpenSSL has let pass.

    `der` is None or empty if it has shown none; `longest` is the longest life it may
    have. Returns the certificate, and its DNS names (`names_of`). Raises
    CredentialsError if it must not be used.
    """
    if not der:
        raise CredentialsError("none", "the peer has shown no certificate")
    try:
        found = x509.load_der_x509_certificate(der)
        there = names_of(found)
        owner = ", ".join(there)[:200] or "the peer"
        check_certificate(found, f"the certificate of {owner}", longest)
    except site_folder.UNREADABLE:
        raise CredentialsError(
            "malformed", "the peer's certificate is damaged"
        ) from None
    return found, there


def check_certificate(
    certificate: x509.Certificate,
    what: str,
    longest: datetime.timedelta = LONGEST_LIFETIME,
) -> None:
    """Checks the kind of a certificate, and its period.

    Raises CredentialsError if it is no certificate of a cluster or lab, or one of
    `site_folder.UNREADABLE`.
    """
    if certificate.serial_number <= 0:
        raise CredentialsError("malformed", f"{what} has no serial number")
    constraints = extension(certificate, x509.BasicConstraints)
    usage = extension(certificate, x509.KeyUsage)
    if (constraints and constraints.ca) or (usage and usage.key_cert_sign):
        raise CredentialsError("authority_as_leaf", f"{what} is an authority's")
    usages = list(extension(certificate, x509.ExtendedKeyUsage) or [])
    if any(each not in usages for each in USAGES):
        there = ", ".join(each._name for each in usages) or "not limited"
        raise CredentialsError(
            "wrong_usage",
            f"{what} is not for both ends of a TLS connection: its extended key usage"
            f" is {there}, and must have serverAuth and clientAuth",
        )
    if not is_strong(certificate.public_key()):
        raise CredentialsError("weak_key", f"the key of {what} is not on P-256")
    digest = certificate.signature_hash_algorithm
    if digest is not None and not isinstance(digest, HASHES):
        raise CredentialsError("weak_digest", f"{what} is signed with {digest.name}")
    _check_period(certificate, what)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end - begin > longest:
        raise CredentialsError(
            "too_long",
            f"{what} is valid for {(end - begin).days} days, from {begin:%Y-%m-%d} to"
            f" {end:%Y-%m-%d}; at most {longest.days} are allowed",
        )


def _check_period(certificate: x509.Certificate, what: str) -> None:
    begin = certificate.not_valid_before_utc
    if site_folder.utc_now() < begin:
        raise CredentialsError(
            "not_yet_valid",
            f"{what} is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC; is this"
            " machine's clock right?",
        )
    _check_end(certificate, what)


def _check_end(certificate: x509.Certificate, what: str) -> None:
    end = certificate.not_valid_after_utc
    if site_folder.utc_now() > end:
        raise CredentialsError("expired", f"{what} expired on {end:%Y-%m-%d %H:%M} UTC")


def is_strong(key: Any) -> bool:
    """Returns True if a public key is on the curve P-256, as all of ours."""
    is_curve = isinstance(key, ec.EllipticCurvePublicKey)
    return is_curve and isinstance(key.curve, ec.SECP256R1)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Returns its DNS names, [] if it has others too; raises one of UNREADABLE."""
    found = extension(certificate, x509.SubjectAlternativeName) or []
    if not all(isinstance(each, x509.DNSName) for each in found):
        return []
    return [each.value for each in found]


def extension(certificate: x509.Certificate, kind: Any) -> Any:
    """Returns an extension's value, or None; raises one of UNREADABLE if damaged."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def in_memory(contents: bytes) -> int:
    """Returns a descriptor of a file in memory, gone when nobody has it open."""
    descriptor = os.memfd_create("credentials")
    os.fchmod(descriptor, 0o600)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(contents)
    return descriptor
