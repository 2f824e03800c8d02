"""Invitations to a federation.

An invitation is one line for a person to hand on, by a way that is trusted. It serves
once, for an hour and for one lab's name. It carries the fingerprint of the authority,
so that the lab that joins trusts no other, and a secret, of which the authority keeps
only a digest. The secret itself crosses no network: who joins sends a MAC over its
requests, so that no switch on the way puts in others.
"""

import base64
import dataclasses
import datetime
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax import strict_json
from nebula_jax.security.membership import site_folder

LIFETIME = datetime.timedelta(hours=1)  # in which two people can pass on a line
SECRET_BYTES = 32  # which nobody guesses; who tries is in the audit log
PREFIX = "nebula1."
_CLAIM = "nebula claim 1"
MOST_CHARACTERS = 2048  # of the text of an invitation; three times what it needs
_CHECK_BYTES = 4  # of a digest, which finds a line that was copied badly

REASONS = {
    "unknown": "there is no such invitation: it may be used, withdrawn or replaced",
    "wrong_name": "the invitation is for another lab's name",
    "expired": "the invitation has expired",
}


@dataclasses.dataclass(frozen=True)
class Invitation:
    """An invitation as the lab that joins reads it."""

    address: str  # host:port of the authority's switch
    fingerprint: str  # of the authority's certificate
    lab: str  # the name for which it serves
    expires: datetime.datetime
    secret: bytes = dataclasses.field(repr=False)  # 32 bytes that show who was invited

    def text(self) -> str:
        """Returns the line to hand on. It is secret."""
        body = json.dumps(
            {
                "address": self.address,
                "fingerprint": self.fingerprint,
                "lab": self.lab,
                "expires": int(self.expires.timestamp()),
                "secret": self.secret.hex(),
            },
            separators=(",", ":"),
        ).encode("ascii")
        data = base64.urlsafe_b64encode(body + _check_bytes(body))
        return PREFIX + data.decode("ascii").rstrip("=")


def parse(text: str) -> Invitation:
    """Reads the text of an invitation: a line, with any space around it.

    Raises site_folder.Refusal, with no part of it, if it is damaged or has expired.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MOST_CHARACTERS:
        raise site_folder.Refusal(
            "malformed", f"this is no invitation: one is a line that begins {PREFIX}"
        )
    data = text.removeprefix(PREFIX)
    try:
        body = base64.b64decode(data + "=" * (-len(data) % 4), b"-_", validate=True)
        body, check = body[:-_CHECK_BYTES], body[-_CHECK_BYTES:]
        if check != _check_bytes(body):
            raise ValueError
        found = strict_json.loads(body)
        invitation = Invitation(
            found["address"],
            found["fingerprint"],
            found["lab"],
            datetime.datetime.fromtimestamp(found["expires"], datetime.UTC),
            bytes.fromhex(found["secret"]),
        )
        whole = (
            site_folder.is_address(invitation.address)
            and site_folder.is_fingerprint(invitation.fingerprint)
            and site_folder.is_lab(invitation.lab)
            and len(invitation.secret) == SECRET_BYTES
        )
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ):
        whole = False
    if not whole:
        raise site_folder.Refusal(
            "malformed",
            "the invitation is damaged: copy its whole line, up to the last character",
        )
    if site_folder.utc_now() >= invitation.expires:
        raise site_folder.Refusal(
            "expired",
            f"the invitation expired at {invitation.expires:%Y-%m-%d %H:%M} UTC; the"
            " lab that made it can make another",
        )
    return invitation


def new(lab: str, address: str, fingerprint: str) -> Invitation:
    """Makes an invitation; for the arguments see `Invitation`."""
    expires = site_folder.utc_now().replace(microsecond=0) + LIFETIME
    secret = secrets.token_bytes(SECRET_BYTES)
    return Invitation(address, fingerprint, lab, expires, secret)


class Claim(NamedTuple):
    """The proof of who has an invitation that certain requests are its own."""

    number: bytes  # of the invitation, 32 bytes, by which it is found
    mac: bytes  # of lab and requests, 32 bytes


def claim(secret: bytes, lab: str, requests: Sequence[bytes]) -> Claim:
    """Makes the proof that a lab's requests come from who was invited."""
    return claim_by(digest(secret), lab, requests)


def claim_by(key: bytes, lab: str, requests: Sequence[bytes]) -> Claim:
    """Makes the proof from the digest of the secret, which the authority has."""
    data = json.dumps([_CLAIM, lab, *(each.decode() for each in requests)]).encode()
    return Claim(digest(key), hmac.digest(key, data, "sha256"))


def digest(secret: bytes) -> bytes:
    """Returns what the authority keeps of a secret, which is the key of its claims."""
    return hashlib.sha256(secret).digest()


def _check_bytes(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]
