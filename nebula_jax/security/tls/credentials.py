"""The credentials of one cluster as it finds them, and if they may be used.

They are three PEM files: the authority that both sides trust, and the certificate and
key of this cluster. OpenSSL checks that a peer's certificate comes from the authority
and is valid at present; what it lets pass is checked here, on either side alike.
"""

import datetime
import os
import pathlib
import re
import stat
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from nebula_jax import errors
from nebula_jax.security import names

LONGEST_LIFETIME = datetime.timedelta(days=2 * 366)
"""A stolen key serves no longer. Twice what `certificates` issues."""
USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
"""The usages of a cluster's certificate: it may listen and connect."""
_DESCRIPTORS = re.compile(r"fd:([0-9]{1,9}),([0-9]{1,9}),([0-9]{1,9})")


class CredentialsError(errors.NebulaError):
    """An error in credentials: they are missing, or must not be used."""


class NoCredentialsError(CredentialsError, errors.SettingsError):
    """A folder, named by a setting, that holds no credentials."""


class Files(NamedTuple):
    """The files of one cluster's credentials."""

    authority: pathlib.Path
    certificate: pathlib.Path
    key: pathlib.Path


def files(where: pathlib.Path) -> Files:
    """Returns the files of credentials.

    Args:
      where: a folder with ca.pem, cert.pem and key.pem; or `fd:CA,CERT,KEY`, the
        numbers of descriptors of files in memory, which the launcher hands down.
    """
    if found := _DESCRIPTORS.fullmatch(str(where)):
        return Files(*(pathlib.Path("/proc/self/fd") / each for each in found.groups()))
    return Files(where / "ca.pem", where / "cert.pem", where / "key.pem")


def check(where: pathlib.Path, cluster: str | None = None) -> Files:
    """Checks that a cluster can use its credentials, and that nobody else can.

    Args:
      where: see `files`.
      cluster: whose they are to be; None for anybody's.

    Returns:
      Their files.

    Raises:
      CredentialsError: in one line that names the file.
    """
    found = files(where)
    try:
        authorities = x509.load_pem_x509_certificates(found.authority.read_bytes())
        certificate = x509.load_pem_x509_certificate(found.certificate.read_bytes())
        mode = stat.S_IMODE(found.key.stat().st_mode)
        key = serialization.load_pem_private_key(found.key.read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:
        raise NoCredentialsError(
            f"tls={where}: needs ca.pem, cert.pem and key.pem: {_brief(error)}"
        ) from None
    for authority in authorities:
        _check_period(authority, f"{found.authority}: the authority")
    what = f"{found.certificate}: the certificate"
    _check_certificate(certificate, what)
    if cluster is not None:
        names_there = _extension(certificate, x509.SubjectAlternativeName, what)
        there = names_there.get_values_for_type(x509.DNSName) if names_there else []
        wanted = names.label(cluster)
        if wanted not in there:
            owner = ", ".join(sorted(there)) or "nobody's DNS name"
            raise CredentialsError(f"{what} is for {owner}, not for {wanted}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CredentialsError(
            f"{found.key}: others can read or change this key (mode {mode:04o}):"
            f" chmod 600 {found.key}"
        )
    if certificate.public_key() != key.public_key():
        raise CredentialsError(f"{found.key}: the key of another certificate")
    return found


def check_peer(certificate: bytes) -> None:
    """Checks a peer's certificate (DER), which OpenSSL has let pass.

    Raises:
      CredentialsError: if it must not be used.
    """
    what = "the peer's certificate"
    try:
        _check_certificate(x509.load_der_x509_certificate(certificate), what)
    except ValueError as error:
        raise CredentialsError(f"{what}: {_brief(error)}") from None


def _check_certificate(certificate: x509.Certificate, what: str) -> None:
    """Checks the period of a cluster's certificate, and what it is for."""
    _check_period(certificate, what)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end - begin > LONGEST_LIFETIME:
        raise CredentialsError(
            f"{what} is valid for {(end - begin).days} days, from {begin:%Y-%m-%d} to"
            f" {end:%Y-%m-%d}; at most {LONGEST_LIFETIME.days} are allowed"
        )
    usages = list(_extension(certificate, x509.ExtendedKeyUsage, what) or [])
    if any(usage not in usages for usage in USAGES):
        there = ", ".join(usage._name for usage in usages) or "not limited"
        raise CredentialsError(
            f"{what} is not for both ends of a TLS connection: its extended key usage"
            f" is {there}, and must have serverAuth and clientAuth"
        )


def _check_period(certificate: x509.Certificate, what: str) -> None:
    if found := out_of_period(certificate, datetime.datetime.now(datetime.UTC)):
        raise CredentialsError(f"{what} {found[1]}")


def out_of_period(
    certificate: x509.Certificate, now: datetime.datetime
) -> tuple[str, str] | None:
    """Returns reason and text if a certificate is not valid at a time."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        text = f"is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC; is this machine's"
        return "not_yet_valid", f"{text} clock right?"
    if now > end:
        return "expired", f"expired on {end:%Y-%m-%d %H:%M:%S} UTC"
    return None


def extension(certificate: x509.Certificate, kind: Any) -> Any:
    """Returns the value of an extension; None if it is not there.

    Raises:
      ValueError, x509.DuplicateExtension: if the certificate is damaged.
    """
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _extension(certificate: x509.Certificate, kind: Any, what: str) -> Any:
    try:
        return extension(certificate, kind)
    except (ValueError, x509.DuplicateExtension) as error:
        raise CredentialsError(f"{what} cannot be read: {_brief(error)}") from None


def in_memory(contents: bytes) -> int:
    """Returns a descriptor of a file in memory, gone when nobody has it open."""
    descriptor = os.memfd_create("credentials")
    os.fchmod(descriptor, 0o600)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(contents)
    return descriptor


def _brief(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split())[:200]
