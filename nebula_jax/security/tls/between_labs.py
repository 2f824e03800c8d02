"""TLS between the switches of two labs, and between their trainers.

A context serves for one connection: one that lived on would let a revoked peer resume
its session. OpenSSL checks the chain, the period and the usage; `check_peer` checks the
revocation list, and what else OpenSSL lets pass. Under TLS 1.3 a client learns only
when it reads first that it was refused, and not always why: the reason is the server's,
`reason_of`.
"""

import datetime
import os
import ssl
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from nebula_jax import errors
from nebula_jax.security import tls
from nebula_jax.security.membership import member, revocation, site_folder
from nebula_jax.security.tls import credentials

LONGEST = datetime.timedelta(days=8)
"""A peer's certificate lasts no longer: a week at most is issued."""
FLOORS = {"1.3": ssl.TLSVersion.TLSv1_3, "1.2": ssl.TLSVersion.TLSv1_2}
CIPHERS = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
"""The ciphers of TLS 1.2: forward secret, and authenticated. 1.3 has no other."""

HASHES = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
"""Digests that a signature may be of; older ones can be forged."""

_VERIFY_CODES = {  # of `verify_code`, OpenSSL's x509_vfy.h
    "unknown_authority": (2, 7, 19, 20, 21, 30),
    "not_yet_valid": (9,),
    "expired": (10,),
    "self_signed": (18,),
    "leaf_as_authority": (24, 25, 32, 79),
    "wrong_usage": (26,),
    "malformed": (34, *range(80, 95)),  # a critical extension; what strict checks find
    "wrong_name": (62,),
    "weak_key": (66, 67),
    "weak_digest": (68,),
}
VERIFY_REASONS = {
    code: reason for reason, codes in _VERIFY_CODES.items() for code in codes
}

SSL_REASONS = {  # of `reason`, OpenSSL's sslerr.h
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "none",
    "HTTP_REQUEST": "plaintext",
    "HTTPS_PROXY_REQUEST": "plaintext",
    "WRONG_VERSION_NUMBER": "plaintext",
    "UNSUPPORTED_PROTOCOL": "tls_version",
    "VERSION_TOO_LOW": "tls_version",
    "INAPPROPRIATE_FALLBACK": "tls_version",
    "TLSV1_ALERT_PROTOCOL_VERSION": "tls_version",
    "NO_SHARED_CIPHER": "weak_cipher",
    "EE_KEY_TOO_SMALL": "weak_key",
    "CA_MD_TOO_WEAK": "weak_digest",
    "UNEXPECTED_EOF_WHILE_READING": "cut_off",
}


class PeerRefused(site_folder.Refusal):
    """An error in what a peer shows: no connection with it."""


class Peer(NamedTuple):
    """A peer whose certificate is in order.

    Attributes:
      lab: that it is a part of.
      role: `switch` or `trainer`.
      serial: of its certificate.
      begin: of its certificate's life, by which it may be revoked later.
      end: of its certificate's life.
    """

    lab: str
    role: str
    serial: int
    begin: datetime.datetime
    end: datetime.datetime


def server_context(
    folder: site_folder.Folder,
    role: str = "switch",
    floor: str = "1.3",
    allows_joining: bool = False,
) -> ssl.SSLContext:
    """Makes the server's context of one connection, from the present files.

    Args:
      role: whose credentials it shows.
      floor: a key of FLOORS; the oldest version of TLS.
      allows_joining: True if a client may come without a certificate, with an
        invitation; `check_peer` refuses it.

    Raises:
      site_folder.FederationError, site_folder.Refusal: if credentials or revocation
        list of this lab do not serve.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder, role, floor)
    context.num_tickets = 0  # TLS 1.3; the option below is for 1.2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_CIPHER_SERVER_PREFERENCE
    if allows_joining:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(
    folder: site_folder.Folder, role: str = "switch", floor: str = "1.3"
) -> ssl.SSLContext:
    """Makes the client's context of one connection, from the present files.

    The server's name has to be given, as `site_folder.dns_name` has it. For the
    arguments and errors see `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, role, floor)


def joining_context(authority: x509.Certificate) -> tuple[ssl.SSLContext, str]:
    """Makes the context of a lab that joins, or that has no revocation list.

    It shows no certificate, and looks nothing up in a list: what comes over it has to
    be signed by the authority.

    Returns:
      The context, and the name that the server has to have: the authority's lab's.
    """
    context = _bare_context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=_der(authority))
    return context, member.issuing_lab(authority)


def unverified_context() -> ssl.SSLContext:
    """Makes a context to fetch the authority's certificate with, from anybody.

    `member.trusted_authority` compares it with the fingerprint, before anything secret
    is sent.
    """
    context = _bare_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_peer(
    der: bytes | None,
    folder: site_folder.Folder,
    expected_name: str | None = None,
    revoked: revocation.RevocationList | None = None,
) -> Peer:
    """Checks a peer's certificate, after OpenSSL or later on a live connection.

    Args:
      der: the certificate; None or empty if it has shown none.
      expected_name: its DNS name; None for any lab's switch or trainer.
      revoked: the list of this side; its switch's if not given.

    Returns:
      Whose it is.

    Raises:
      PeerRefused: if it must not be used.
      revocation.ListRefused: if this lab has no revocation list that serves.
    """
    if not der:
        raise PeerRefused("none", "the peer has shown no certificate")
    try:
        certificate = x509.load_der_x509_certificate(der)
        peer = _named(certificate, expected_name)
        _check_kind(certificate)
    except site_folder.UNREADABLE:
        raise PeerRefused("malformed", "the peer's certificate is damaged") from None
    what = f"the certificate of {site_folder.dns_name(peer.lab, peer.role)}"
    if wrong := credentials.out_of_period(certificate, site_folder.utc_now()):
        reason, text = wrong
        raise PeerRefused(reason, f"{what} {text}")
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end - begin > LONGEST:
        raise PeerRefused(
            "too_long",
            f"{what} is valid for {(end - begin).days} days, more than {LONGEST.days}",
        )
    listed = revoked or revocation.RevocationList(folder)
    listed.check()
    if listed.is_revoked(peer.lab, begin):
        raise PeerRefused("revoked", f"{what} was revoked")
    return peer


def reason_of(error: BaseException) -> str:
    """Returns why a connection came to nothing, in one word for the audit log.

    Args:
      error: as the server sees it: of a handshake, of `check_peer`, or of reading.
    """
    if isinstance(error, site_folder.Refusal):
        return error.reason
    if isinstance(error, errors.NebulaError):
        return "own_folder"
    if isinstance(error, ssl.SSLCertVerificationError):
        return VERIFY_REASONS.get(error.verify_code, f"certificate_{error.verify_code}")
    if isinstance(error, ssl.SSLZeroReturnError):
        return "closed"
    if isinstance(error, ssl.SSLEOFError):
        return "cut_off"
    if isinstance(error, ssl.SSLError) and error.reason:
        named = "refused_by_peer" if "ALERT" in error.reason else "no_handshake"
        return SSL_REASONS.get(error.reason, named)
    if isinstance(error, TimeoutError):
        return "stalled"
    if isinstance(error, ConnectionAbortedError) and "longer than" in str(error):
        return "stalled"  # asyncio's words when a handshake has taken too long
    if isinstance(error, ConnectionError | EOFError):
        return "cut_off"
    return "failed"


def _context(
    side: int, folder: site_folder.Folder, role: str, floor: str
) -> ssl.SSLContext:
    own = member.load(folder, role)
    revocation.RevocationList(folder, role).check()
    context = _bare_context(side, floor)
    context.certificate = _der(own.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    descriptor = credentials.in_memory(own.pem)  # as it was checked: it is replaced
    try:
        context.load_verify_locations(cadata=_der(own.authority))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (OSError, ssl.SSLError) as error:
        raise site_folder.FederationError(
            f"{folder.path}: OpenSSL does not take {role}.pem: {error}"
        ) from None
    finally:
        os.close(descriptor)
    return context


def _bare_context(side: int, floor: str = "1.3") -> tls.Context:
    """Makes a context that trusts nobody yet."""
    if floor not in FLOORS:
        raise errors.SettingsError(
            f"TLS {floor!r} cannot be the oldest version: it is one of"
            f" {', '.join(FLOORS)}"
        )
    context = tls.Context(side)
    context.minimum_version = FLOORS[floor]
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def _named(certificate: x509.Certificate, expected_name: str | None) -> Peer:
    """Returns whose certificate it is; raises UNREADABLE if it is damaged."""
    found = member.names_of(certificate)
    owner = site_folder.parse_name(found[0]) if len(found) == 1 else None
    if owner is None:
        raise PeerRefused(
            "wrong_name", "the peer's certificate is not for one part of one lab"
        )
    if expected_name is not None and found != [expected_name]:
        raise PeerRefused(
            "wrong_name",
            f"the peer's certificate is for {found[0]}, not for {expected_name}",
        )
    lab, role = owner
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Peer(lab, role, certificate.serial_number, begin, end)


def _check_kind(certificate: x509.Certificate) -> None:
    """Checks that a certificate is of a kind that an authority issues to labs."""
    what = "the peer's certificate"
    if certificate.serial_number <= 0:
        raise PeerRefused("malformed", f"{what} has no serial number")
    constraints = credentials.extension(certificate, x509.BasicConstraints)
    usage = credentials.extension(certificate, x509.KeyUsage)
    if (constraints and constraints.ca) or (usage and usage.key_cert_sign):
        raise PeerRefused("authority_as_leaf", f"{what} is an authority's")
    usages = list(credentials.extension(certificate, x509.ExtendedKeyUsage) or [])
    if any(each not in usages for each in credentials.USAGES):
        raise PeerRefused("wrong_usage", f"{what} is not for both ends of a connection")
    if not member.is_strong(certificate.public_key()):
        raise PeerRefused("weak_key", f"the key of {what} is not on P-256")
    digest = certificate.signature_hash_algorithm
    if digest is not None and not isinstance(digest, HASHES):
        raise PeerRefused("weak_digest", f"{what} is signed with {digest.name}")


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)
