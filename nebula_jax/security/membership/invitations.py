"""Invitations to a federation, and the labs that have come.

An invitation is one line for a person to hand on, by a way that is trusted. It serves
once, for an hour and for one lab's name. It carries the fingerprint of the authority,
so that the lab that joins trusts no other, and a secret, of which the authority keeps
only a digest. The secret itself crosses no network: who joins sends a MAC over its
requests, so that no switch on the way puts in others. Functions of a `connection` are
parts of a transaction of the authority's database.
"""

import base64
import binascii
import dataclasses
import datetime
import hashlib
import hmac
import json
import secrets
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax import strict_json
from nebula_jax.security.membership import site_folder

LIFETIME = datetime.timedelta(hours=1)
"""As long as it takes two people to pass on a line."""
SECRET_BYTES = 32  # which nobody guesses; who tries is in the audit log
KEPT = datetime.timedelta(days=30)
"""Old invitations are kept for so long: a second use is then called one."""

PREFIX = "nebula1."
_CLAIM = "nebula claim 1"
MOST_CHARACTERS = 2048  # of the text of an invitation; three times what it needs
_CHECK_BYTES = 4  # of a digest, which finds a line that was copied badly

REASONS = {
    "guessed": "there is no such invitation",
    "wrong_name": "the invitation is for another lab's name",
    "used": "the invitation was used before",
    "withdrawn": "the invitation was withdrawn, or a newer one replaced it",
    "expired": "the invitation has expired",
}


class InvitationRefused(site_folder.Refusal):
    """An error in an invitation that somebody shows."""


@dataclasses.dataclass(frozen=True)
class Invitation:
    """An invitation as the lab that joins reads it.

    Attributes:
      address: host:port of the authority's switch.
      fingerprint: of the authority's certificate.
      lab: the name for which it serves.
      expires: the end of its life.
      secret: 32 bytes that show who was invited. No text of this object has them.
    """

    address: str
    fingerprint: str
    lab: str
    expires: datetime.datetime
    secret: bytes = dataclasses.field(repr=False)

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


def parse(text: str, now: datetime.datetime | None = None) -> Invitation:
    """Reads the text of an invitation.

    Args:
      text: the line; space around it does no harm.
      now: the time; by default this machine's.

    Raises:
      InvitationRefused: if it is damaged or has expired. No error has a part of it.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MOST_CHARACTERS:
        raise InvitationRefused(
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
        *(binascii.Error, ValueError, TypeError, KeyError, OverflowError),
        *(AttributeError, OSError),
    ):
        whole = False
    if not whole:
        raise InvitationRefused(
            "malformed",
            "the invitation is damaged: copy its whole line, up to the last character",
        )
    if (now or site_folder.utc_now()) >= invitation.expires:
        raise InvitationRefused(
            "expired",
            f"the invitation expired at {invitation.expires:%Y-%m-%d %H:%M} UTC; the"
            " lab that made it can make another",
        )
    return invitation


def invite(
    connection: sqlite3.Connection,
    lab: str,
    address: str,
    fingerprint: str,
    now: datetime.datetime,
) -> Invitation:
    """Makes an invitation, which replaces an older one for the same lab."""
    expires = now.replace(microsecond=0) + LIFETIME
    secret = secrets.token_bytes(SECRET_BYTES)
    withdraw(connection, lab)
    old = int((now - KEPT).timestamp())
    connection.execute("DELETE FROM invitations WHERE expires < ?", (old,))
    connection.execute(
        "INSERT INTO invitations VALUES (?, ?, ?, 'open')",
        (_digest(secret), lab, int(expires.timestamp())),
    )
    return Invitation(address, fingerprint, lab, expires, secret)


class Claim(NamedTuple):
    """The proof of who has an invitation that certain requests are its own.

    Attributes:
      number: of the invitation, 32 bytes, by which it is found.
      mac: of lab and requests, 32 bytes.
    """

    number: bytes
    mac: bytes


def claim(secret: bytes, lab: str, requests: Sequence[bytes]) -> Claim:
    """Makes the proof that a lab's requests come from who was invited."""
    return _claim(_digest(secret), lab, requests)


def _claim(key: bytes, lab: str, requests: Sequence[bytes]) -> Claim:
    data = json.dumps([_CLAIM, lab, *(each.decode() for each in requests)]).encode()
    return Claim(_digest(key), hmac.digest(key, data, "sha256"))


def redeem(
    connection: sqlite3.Connection,
    made: Claim,
    lab: str,
    requests: Sequence[bytes],
    now: datetime.datetime,
) -> str:
    """Uses an invitation up, and admits the lab; returns a key of REASONS if not."""
    query = "SELECT digest, lab, expires, state FROM invitations"
    rows = connection.execute(query).fetchall()
    found = [row for row in rows if _digest(row[0]) == made.number]
    if not found:
        return "guessed"
    key, owner, expires, state = found[0]
    if owner != lab:
        return "wrong_name"
    if not hmac.compare_digest(_claim(key, lab, requests).mac, made.mac):
        return "guessed"
    if state != "open":
        return state
    if now.timestamp() >= expires:
        return "expired"
    connection.execute("UPDATE invitations SET state = 'used' WHERE digest = ?", (key,))
    set_state(connection, lab, "member", now)
    return ""


def withdraw(connection: sqlite3.Connection, lab: str) -> int:
    """Withdraws the open invitations of a lab; returns how many."""
    return connection.execute(
        "UPDATE invitations SET state = 'withdrawn' WHERE lab = ? AND state = 'open'",
        (lab,),
    ).rowcount


def state(connection: sqlite3.Connection, lab: str) -> str | None:
    """Returns `member` or `revoked`; None of a lab that has never come."""
    query = "SELECT state FROM labs WHERE name = ?"
    found = connection.execute(query, (lab,)).fetchone()
    return found[0] if found else None


def member_since(connection: sqlite3.Connection, lab: str) -> int | None:
    """Returns when a lab became a member, in unix seconds; None if it is none."""
    query = "SELECT since FROM labs WHERE name = ? AND state = 'member'"
    found = connection.execute(query, (lab,)).fetchone()
    return found[0] if found else None


def set_state(
    connection: sqlite3.Connection, lab: str, state: str, now: datetime.datetime
) -> None:
    """Makes a lab a member, or ends that until it is invited anew."""
    connection.execute(
        "INSERT OR REPLACE INTO labs VALUES (?, ?, ?)",
        (lab, state, int(now.timestamp())),
    )


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _check_bytes(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]
