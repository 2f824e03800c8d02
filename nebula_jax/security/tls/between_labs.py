"""TLS between the switches of two labs, and between their trainers.

A context serves for one connection: one that lived on would let a revoked peer resume
its session. OpenSSL checks the chain, the period and the usage; `check_peer` checks the
revocation list, and what else OpenSSL lets pass. In TLS 1.3 a client learns only
when it reads first that it was refused, and not always why: the reason is the server's,
`reason_of`.
"""

import datetime
import ssl
from typing import NamedTuple

from cryptography import x509

from nebula_jax import errors
from nebula_jax.security import tls
from nebula_jax.security.membership import member, revocation, site_folder
from nebula_jax.security.tls import certificates, credentials

LONGEST = datetime.timedelta(days=8)
"""A peer's certificate lasts no longer: those issued last five days."""

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
    "TLSV1_ALERT_PROTOCOL_VERSION": "tls_version",
    "EE_KEY_TOO_SMALL": "weak_key",
    "CA_MD_TOO_WEAK": "weak_digest",
    "UNEXPECTED_EOF_WHILE_READING": "cut_off",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "expired",
}


class Peer(NamedTuple):
    """A peer whose certificate is in order."""

    lab: str  # that it is a part of
    role: str  # `switch` or `trainer`
    serial: int  # of its certificate
    begin: datetime.datetime  # of its certificate's life: revocation goes by it
    end: datetime.datetime  # of its certificate's life


def server_context(
    folder: site_folder.Folder,
    role: str = "switch",
    allows_joining: bool = False,
) -> ssl.SSLContext:
    """Makes the server's context of one connection, from the present files.

    It shows the credentials of `role`. With `allows_joining` a client may come without
    a certificate, with an invitation (`check_peer` refuses it), and this side may have
    expired, and say so. Raises site_folder.FederationError, site_folder.Refusal if
    credentials or revocation list of this lab do not serve.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder, role, allows_joining)
    if allows_joining:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(
    folder: site_folder.Folder, role: str = "switch", shows_expired: bool = False
) -> ssl.SSLContext:
    """Makes the client's context of one connection, from the present files.

    The server's name has to be given, as `site_folder.dns_name` has it. With
    `shows_expired` this side may have expired, and is to say so. For the other
    arguments and errors see `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, role, shows_expired)


def joining_context(authority: x509.Certificate) -> tuple[ssl.SSLContext, str]:
    """Makes the context of a lab that joins, or that has no revocation list.

    It shows no certificate, and looks nothing up in a list: what comes over it has to
    be signed by the authority. Returns it, and the name that the server has to have,
    which is that of the authority's lab.
    """
    context = tls.bare_context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.public_bytes(tls.DER))
    return context, member.issuing_lab(authority)


def unverified_context() -> ssl.SSLContext:
    """Makes a context to fetch the authority's certificate with, from anybody.

    `member.trusted_authority` checks the fingerprint, before anything secret is sent.
    """
    context = tls.bare_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_peer(
    der: bytes | None, folder: site_folder.Folder, role: str = "switch"
) -> Peer:
    """Checks a peer's certificate, after OpenSSL or later on a live connection.

    `der` is the certificate; None or empty if it has shown none. `role` is that of this
    side, whose revocation list counts. Returns whose it is. Raises
    credentials.CredentialsError if it must not be used, revocation.ListRefused if this
    lab has no list that serves.
    """
    certificate, found = credentials.check_peer(der, LONGEST)
    owner = site_folder.parse_name(found[0]) if len(found) == 1 else None
    if owner is None:
        raise credentials.CredentialsError(
            "wrong_name", "the peer's certificate is not for one part of one lab"
        )
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not certificates.is_logged(certificate, member.pinned_authority(folder)):
        raise credentials.CredentialsError(
            "unlogged",
            f"the certificate of {found[0]} has no receipt of the audit log of the lab"
            " that issues certificates",
        )
    listed = revocation.RevocationList(folder, role)
    listed.check()
    if listed.is_revoked(owner[0], begin):
        text = f"the certificate of {found[0]} was revoked"
        raise credentials.CredentialsError("revoked", text)
    return Peer(*owner, certificate.serial_number, begin, end)


def reason_of(error: BaseException) -> str:
    """Returns why a connection came to nothing, in one word for the audit log.

    `error` is as the server sees it: of a handshake, of `check_peer`, or of reading.
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


def in_words(error: BaseException) -> str:
    """Returns why a connection came to nothing; of a period, with this clock's time."""
    text = tls.in_words(error)
    if reason_of(error) in ("expired", "not_yet_valid"):
        text += f"; here it is {site_folder.utc_now():%Y-%m-%d %H:%M} UTC: is it?"
    return text


def _context(
    side: int, folder: site_folder.Folder, role: str, shows_expired: bool
) -> ssl.SSLContext:
    own = member.load(folder, role, shows_expired)
    if not shows_expired:  # else `check_peer` finds a list that has expired as well
        revocation.RevocationList(folder, role).check()
    return tls.context(side, own)
