"""The credentials of a lab: keys that never leave, and certificates that are replaced.

A lab makes a key, sends a request with its public half, and installs the certificate
that comes back. Key, certificate and authority lie in one file, `switch.pem`, which is
replaced whole: a reader that reads it once has parts that belong together.

Whoever renews a certificate shows the one before, and signs the request with its key
too. So it does not matter who carries the request: a switch that carries those of its
trainers, or other labs' to the authority, gets no certificate for a key of its own.
"""

import contextlib
import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nebula_jax.security import private_files
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import certificates, credentials

_DIGEST = ec.ECDSA(hashes.SHA256())
RENEWAL = 1 / 5
"""The part of its life after which a certificate is renewed: of five days, four are
left for an authority that is away."""
BACKDATED = datetime.timedelta(seconds=60)
"""Clocks of labs may be this far behind the authority's."""
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_PURPOSE = b"nebula renewal 1\0"


class Request(NamedTuple):
    """A new key, which stays here, and the request for its certificate (PEM)."""

    key: ec.EllipticCurvePrivateKey
    csr: bytes


class Renewal(NamedTuple):
    """A request for a certificate (PEM), from who has one that it is to replace."""

    csr: bytes  # the request for the new key (PEM)
    certificate: bytes  # the one before (PEM)
    proof: bytes  # a signature of the request by the key of that one

    def fields(self) -> dict[str, str]:
        """Returns it as fields of a JSON object."""
        return {
            "csr": self.csr.decode(),
            "certificate": self.certificate.decode(),
            "proof": self.proof.hex(),
        }

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Renewal":
        """Reads what `fields` returns; raises CredentialsError if it is none."""
        try:
            csr, certificate = fields["csr"].encode(), fields["certificate"].encode()
            return cls(csr, certificate, bytes.fromhex(fields["proof"]))
        except (KeyError, AttributeError, ValueError, TypeError):
            raise credentials.CredentialsError(
                "malformed", "this is no renewal"
            ) from None


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
    key: ec.EllipticCurvePrivateKey,
    certificate_pem: bytes,
    ca_pem: bytes | None = None,
) -> x509.Certificate:
    """Replaces the credentials of a role, key and certificates at once.

    `certificate_pem` is the certificate that was issued, which is returned, and that of
    the issuer; `ca_pem` the authority's own, the root, or None if this lab has it.
    Raises credentials.CredentialsError if they do not fit, and what was there stays;
    errors.NebulaError if the folder does not serve.
    """
    settings = folder.load()
    try:
        certificate, *between = x509.load_pem_x509_certificates(certificate_pem)
        authority = (
            x509.load_pem_x509_certificate(ca_pem)
            if ca_pem is not None
            else pinned_authority(folder)
        )
    except site_folder.UNREADABLE:
        raise credentials.CredentialsError(
            "malformed", "what the authority sent are no certificates"
        ) from None
    pem = certificates.pem(key, certificate, *between, authority)
    made = credentials.Credentials(pem, key, certificate, between, authority)
    _check(settings, role, made, "the certificate from the authority")
    private_files.write(folder.credentials(role), pem.decode())
    return certificate


def load(
    folder: site_folder.Folder, role: str, allows_expired: bool = False
) -> credentials.Credentials:
    """Reads the newest credentials of a role, and checks them.

    `allows_expired` lets a certificate that has expired be shown to a peer, which then
    knows why it gets no other. Raises credentials.CredentialsError, with the file's
    name, if they must not be used; site_folder.FederationError if there are none, or
    others can read the key.
    """
    settings = folder.load()  # which checks the modes
    found = _read(folder, role)
    try:
        _check(settings, role, found, f"{folder.credentials(role)}: the certificate")
    except credentials.CredentialsError as error:
        if error.reason != "expired" or not allows_expired:
            raise
    return found


def own_certificate(folder: site_folder.Folder, role: str) -> x509.Certificate:
    """Reads a role's newest certificate, even expired; FederationError without one."""
    return _read(folder, role).certificate


def issuer(folder: site_folder.Folder) -> x509.Certificate:
    """Reads the certificate that signs the switch's; FederationError without one."""
    found = _read(folder, "switch")
    return [*found.between, found.authority][0]


def _read(folder: site_folder.Folder, role: str) -> credentials.Credentials:
    """Reads a role's newest credentials, unchecked; raises FederationError if none."""
    path = folder.credentials(role)
    try:
        return credentials.parse(path.read_bytes())
    except FileNotFoundError:
        raise site_folder.FederationError(
            f"{path}: is missing; `nebula init` and `nebula join` make it"
        ) from None
    except (OSError, *site_folder.UNREADABLE) as error:
        text = " ".join(str(error).split())[:200]
        raise site_folder.FederationError(f"{path}: cannot be read: {text}") from None


def renewal_request(folder: site_folder.Folder, role: str) -> tuple[Request, Renewal]:
    """Makes a new key, and the request for its certificate by the present one's key.

    That may have expired (`authority.GRACE`). Raises FederationError if there is none,
    or others can read the key.
    """
    folder.check()
    found = _read(folder, role)
    made, pem = new_request(), serialization.Encoding.PEM
    proof = found.key.sign(_PURPOSE + made.csr, _DIGEST)
    return made, Renewal(made.csr, found.certificate.public_bytes(pem), proof)


def check_proof(certificate: x509.Certificate, renewal: Renewal) -> None:
    """Raises InvalidSignature unless a certificate's key has signed a request."""
    key: Any = certificate.public_key()
    key.verify(renewal.proof, _PURPOSE + renewal.csr, _DIGEST)


def pinned_authority(folder: site_folder.Folder) -> x509.Certificate:
    """Reads the authority's certificate, as its fingerprint in federation.json has it.

    Raises FederationError if there is none, and as `trusted_authority`.
    """
    settings = folder.load()
    for path in (folder.switch, folder.trainer, folder.authority_key):
        with contextlib.suppress(FileNotFoundError):
            *_, last = path.read_bytes().rpartition(_BEGIN)  # the authority's is last
            return trusted_authority(_BEGIN + last, settings.fingerprint)
    raise site_folder.FederationError(
        f"{folder.path}: this lab has no credentials; `nebula init` and `nebula join`"
        " make them"
    )


def trusted_authority(ca_pem: bytes, fingerprint: str) -> x509.Certificate:
    """Reads the certificate of an authority that only its fingerprint vouches for.

    `ca_pem` is from anybody, `fingerprint` from an invitation or federation.json.
    Raises credentials.CredentialsError if it is another one.
    """
    try:
        authority = x509.load_pem_x509_certificate(ca_pem)
    except site_folder.UNREADABLE:
        raise credentials.CredentialsError(
            "malformed", "this is no certificate"
        ) from None
    if site_folder.fingerprint(authority) != fingerprint:
        raise credentials.CredentialsError(
            "unknown_authority",
            "the authority's certificate is not the one that was agreed: its"
            f" fingerprint is {site_folder.fingerprint(authority)}, not {fingerprint}",
        )
    return authority


def issuing_lab(authority: x509.Certificate) -> str:
    """Returns the lab that an authority names; raises CredentialsError without one."""
    found = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    value = found[0].value if len(found) == 1 else ""
    if not isinstance(value, str) or not site_folder.is_lab(value):
        raise credentials.CredentialsError("wrong_name", "the authority is of no lab")
    return value


def renewal_due(certificate: x509.Certificate) -> bool:
    """Returns True if a certificate should be renewed, or has expired."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return site_folder.utc_now() >= begin + (end - begin) * RENEWAL


def _check(
    settings: site_folder.Settings, role: str, own: credentials.Credentials, what: str
) -> None:
    """Checks credentials of this lab; raises credentials.CredentialsError.

    Their authority is the pinned one.
    """
    pem = own.authority.public_bytes(serialization.Encoding.PEM)
    trusted_authority(pem, settings.fingerprint)
    try:
        credentials.check(own, what, site_folder.dns_name(settings.name, role))
    except credentials.CredentialsError as error:
        if error.reason != "expired":
            raise
        text = "a running `nebula switch` that reaches the authority replaces it"
        raise credentials.CredentialsError("expired", f"{error}; {text}") from None
