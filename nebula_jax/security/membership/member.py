"""The credentials of a lab: keys that never leave, and certificates that are replaced.

A lab makes a key, sends a request with its public half, and installs the certificate
that comes back. Key, certificate and authority lie in a folder `switch.7`, and `switch`
is a link to it: a reader that follows the link once has files that belong together.

Whoever renews a certificate shows the one before, and signs the request with its key
too. So it does not matter who carries the request: a switch that carries those of its
trainers, or other labs' to the authority, gets no certificate for a key of its own.
"""

import contextlib
import datetime
import itertools
import os
import pathlib
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from nebula_jax import disk, files
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import certificates, credentials

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
STRONG_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

RENEWAL = 1 / 5
"""The part of its life after which a certificate is renewed: of five days, four are
left for an authority that is away."""
BACKDATED = datetime.timedelta(seconds=60)
"""Clocks of labs may be this far behind the authority's."""
KEPT = 2
"""Folders of credentials that stay: the newest and the one before."""
_PURPOSE = b"nebula renewal 1\0"
KEPT_SECONDS = 60.0
"""Older folders stay for so long after they were replaced: somebody who has followed
the link may still be reading one."""


class CredentialsRefused(site_folder.Refusal):
    """An error in credentials of this lab: they must not be used."""


class Request(NamedTuple):
    """A new key, which stays here, and the request for its certificate (PEM)."""

    key: PrivateKey
    csr: bytes


class Renewal(NamedTuple):
    """A request for a certificate (PEM), from who has one that it is to replace.

    Attributes:
      csr: the request for the new key (PEM).
      certificate: the one before (PEM).
      proof: a signature of the request by the key of that one.
    """

    csr: bytes
    certificate: bytes
    proof: bytes

    def fields(self) -> dict[str, str]:
        """Returns it as fields of a JSON object."""
        return {
            "csr": self.csr.decode(),
            "certificate": self.certificate.decode(),
            "proof": self.proof.hex(),
        }

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Renewal":
        """Reads the fields of `fields`.

        Raises:
          CredentialsRefused: if they are none.
        """
        try:
            csr, certificate = fields["csr"].encode(), fields["certificate"].encode()
            return cls(csr, certificate, bytes.fromhex(fields["proof"]))
        except (KeyError, AttributeError, ValueError, TypeError):
            raise CredentialsRefused("malformed", "this is no renewal") from None


class Credentials(NamedTuple):
    """A set of credentials that are in order.

    Attributes:
      folder: with ca.pem, cert.pem and key.pem; it is no link.
      certificate: of this lab.
      authority: the pinned one, which issued it.
    """

    folder: pathlib.Path
    certificate: x509.Certificate
    authority: x509.Certificate


def is_strong(key: Any) -> bool:
    """Returns True if a public key is on a curve of NIST from P-256 on, or Ed25519."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return isinstance(key.curve, STRONG_CURVES)
    return isinstance(key, ed25519.Ed25519PublicKey)


def new_request() -> Request:
    """Makes a key, and the request for a certificate of it.

    The request has no name that counts: the authority chooses it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Nebula-JAX")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    csr = builder.sign(key, hashes.SHA256())
    return Request(key, csr.public_bytes(serialization.Encoding.PEM))


def install(
    folder: site_folder.Folder,
    role: str,
    key: PrivateKey,
    certificate_pem: bytes,
    ca_pem: bytes,
    now: datetime.datetime | None = None,
) -> x509.Certificate:
    """Replaces the credentials of a role, all three files as one.

    Args:
      folder: of this lab.
      role: `switch` or `trainer`.
      key: of the request.
      certificate_pem: the certificate that the authority issued for it.
      ca_pem: the authority's certificate.
      now: the time; by default this machine's.

    Returns:
      The certificate.

    Raises:
      CredentialsRefused: if they do not fit; what was there stays.
      site_folder.FederationError: if the folder does not serve.
    """
    settings = folder.load()
    link = folder.credentials(role)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        authority = x509.load_pem_x509_certificate(ca_pem)
    except site_folder.UNREADABLE:
        raise CredentialsRefused(
            "malformed", "what the authority sent are not two certificates"
        ) from None
    what = "the certificate from the authority"
    _check(settings, role, key.public_key(), certificate, authority, what, now)
    pem = serialization.Encoding.PEM
    contents = certificates.Credentials(
        authority.public_bytes(pem),
        certificate.public_bytes(pem),
        certificates.key_pem(key),
    )
    with folder.locked():
        number = 1 + max(_numbers(folder, role), default=0)
        try:
            with files.writing(link.with_name(f"{role}.{number}")) as partial:
                certificates.write(partial, contents)
            partial_link = link.with_name(f".{role}.{secrets.token_hex(8)}")
            partial_link.symlink_to(f"{role}.{number}")
            os.replace(partial_link, link)
            disk.sync(link.parent)
        except OSError as error:
            raise site_folder.FederationError(f"{link}: {error.strerror}") from None
        _remove_former(folder, role)
    return certificate


def load(
    folder: site_folder.Folder, role: str, now: datetime.datetime | None = None
) -> Credentials:
    """Reads the newest credentials of a role, and checks them.

    Args:
      folder: of this lab.
      role: `switch` or `trainer`.
      now: the time; by default this machine's.

    Raises:
      CredentialsRefused: if they must not be used: in one line that names the file.
      site_folder.FederationError: if there are none, or others can read the key.
    """
    settings = folder.load()  # which checks the modes
    found, key = _read(folder, role)
    what = str(found.folder / "cert.pem")
    _check(
        settings, role, key.public_key(), found.certificate, found.authority, what, now
    )
    return found


def _read(folder: site_folder.Folder, role: str) -> tuple[Credentials, Any]:
    """Reads the newest credentials of a role and their key, and checks nothing."""
    link = folder.credentials(role)
    try:
        found = credentials.files(link.resolve(strict=True))
        certificate = x509.load_pem_x509_certificate(found.certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(found.authority.read_bytes())
        key = serialization.load_pem_private_key(found.key.read_bytes(), None)
    except FileNotFoundError:
        raise site_folder.FederationError(
            f"{link}: needs ca.pem, cert.pem and key.pem; `nebula init` and"
            " `nebula join` make them"
        ) from None
    except (OSError, *site_folder.UNREADABLE) as error:
        text = " ".join(str(error).split())[:200]
        raise site_folder.FederationError(f"{link}: cannot be read: {text}") from None
    return Credentials(found.key.parent, certificate, authority), key


def renewal_request(folder: site_folder.Folder, role: str) -> tuple[Request, Renewal]:
    """Makes a new key, and the request for its certificate by the present one's key.

    The present one may have expired; see `authority.GRACE`.

    Args:
      folder: of this lab.
      role: `switch` or `trainer`.

    Raises:
      site_folder.FederationError: if there are none, or others can read the key.
    """
    folder.check()
    found, key = _read(folder, role)
    made, pem = new_request(), serialization.Encoding.PEM
    proof = _sign(key, _PURPOSE + made.csr)
    return made, Renewal(made.csr, found.certificate.public_bytes(pem), proof)


def is_proof(certificate: x509.Certificate, renewal: Renewal) -> bool:
    """Returns True if a request was signed with the key of a certificate."""
    key: Any = certificate.public_key()
    data = _PURPOSE + renewal.csr
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(renewal.proof, data)
        else:
            key.verify(renewal.proof, data, ec.ECDSA(hashes.SHA256()))
    except exceptions.InvalidSignature:
        return False
    return True


def _sign(key: Any, data: bytes) -> bytes:
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    return bytes(key.sign(data, ec.ECDSA(hashes.SHA256())))


def pinned_authority(folder: site_folder.Folder) -> x509.Certificate:
    """Reads the authority's certificate, as its fingerprint in federation.json has it.

    Raises:
      CredentialsRefused: if it is another one.
      site_folder.FederationError: if there is none.
    """
    settings = folder.load()
    parts = (folder.switch, folder.trainer, folder.authority)
    for path in (each / "ca.pem" for each in parts):
        with contextlib.suppress(FileNotFoundError):
            return trusted_authority(path.read_bytes(), settings.fingerprint)
    raise site_folder.FederationError(
        f"{folder.path}: this lab has no credentials; `nebula init` and `nebula join`"
        " make them"
    )


def trusted_authority(ca_pem: bytes, fingerprint: str) -> x509.Certificate:
    """Reads the certificate of an authority that only its fingerprint vouches for.

    Args:
      ca_pem: the certificate, from anybody.
      fingerprint: of the right one, from an invitation or federation.json.

    Raises:
      CredentialsRefused: if it is another one.
    """
    try:
        authority = x509.load_pem_x509_certificate(ca_pem)
    except site_folder.UNREADABLE:
        raise CredentialsRefused("malformed", "this is no certificate") from None
    if site_folder.fingerprint(authority) != fingerprint:
        raise CredentialsRefused(
            "unknown_authority",
            "the authority's certificate is not the one that was agreed: its"
            f" fingerprint is {site_folder.fingerprint(authority)}, not {fingerprint}",
        )
    return authority


def issuing_lab(authority: x509.Certificate) -> str:
    """Returns the lab whose authority this is: its certificate has the name.

    Raises:
      CredentialsRefused: if it has none.
    """
    found = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    value = found[0].value if len(found) == 1 else ""
    if not isinstance(value, str) or not site_folder.is_lab(value):
        raise CredentialsRefused("wrong_name", "the authority is of no lab")
    return value


def renewal_due(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    """Returns True if a certificate should be renewed, or has expired."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= begin + (end - begin) * RENEWAL


def names_of(certificate: x509.Certificate) -> list[str]:
    """Returns the DNS names of a certificate, or [] if it has other names as well.

    Raises:
      Exception: one of `site_folder.UNREADABLE`.
    """
    found = credentials.extension(certificate, x509.SubjectAlternativeName) or []
    if not all(isinstance(each, x509.DNSName) for each in found):
        return []
    return [each.value for each in found]


def _check(
    settings: site_folder.Settings,
    role: str,
    key: Any,
    certificate: x509.Certificate,
    authority: x509.Certificate,
    what: str,
    now: datetime.datetime | None,
) -> None:
    """Checks credentials of this lab.

    Raises:
      CredentialsRefused: if they must not be used.
    """
    now = now or site_folder.utc_now()
    pem = authority.public_bytes(serialization.Encoding.PEM)
    trusted_authority(pem, settings.fingerprint)
    try:
        certificate.verify_directly_issued_by(authority)
        found = names_of(certificate)
    except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
        raise CredentialsRefused(
            "unknown_authority", f"{what} was not issued by this federation's authority"
        ) from None
    if certificate.public_key() != key:
        raise CredentialsRefused("wrong_key", f"{what} is for another key")
    wanted = site_folder.dns_name(settings.name, role)
    if found != [wanted]:
        owner = ", ".join(found)[:200] or "nobody"
        raise CredentialsRefused("wrong_name", f"{what} is for {owner}, not {wanted}")
    if wrong := credentials.out_of_period(certificate, now):
        reason, text = wrong
        if reason == "expired":
            text += "; a running `nebula switch` that reaches the authority replaces it"
        raise CredentialsRefused(reason, f"{what} {text}")


def _numbers(folder: site_folder.Folder, role: str) -> list[int]:
    pattern = re.compile(rf"{role}\.([0-9]{{1,18}})")
    found = map(pattern.fullmatch, disk.names(folder.of(role)))
    return sorted(int(each[1]) for each in found if each)


def _remove_former(folder: site_folder.Folder, role: str) -> None:
    """Removes what was replaced long ago."""
    where, numbers = folder.of(role), _numbers(folder, role)
    paths = [where / f"{role}.{each}" for each in numbers]
    for path, successor in itertools.pairwise(paths[: 1 - KEPT]):
        with contextlib.suppress(OSError):  # the next installation tries again
            if time.time() - successor.stat().st_mtime > KEPT_SECONDS:
                disk.remove(path)
