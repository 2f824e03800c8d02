"""The authority of a federation: it issues certificates, and revokes them.

It lies in the folder of the lab that founded the federation. The authority decides
names. What a request has in it besides its key does not count: a certificate is for a
lab and a role, and a lab gets one while it is a member. Requests come by way of
switches, of which none is believed: an invitation's secret, or the key of the former
certificate, vouches for every one.
"""

import datetime
import math
import pathlib
import sqlite3
from collections.abc import Sequence
from typing import Any

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nebula_jax import files
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.membership import (
    invitations,
    issuing,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.membership.site_folder import FederationError
from nebula_jax.security.tls import certificates

LIST_RENEWAL = datetime.timedelta(days=1)
"""The age at which a revocation list is signed anew: six are missed before one ends."""
LIST_MEMORY = datetime.timedelta(days=1)
"""A certificate that expired so long ago is refused for that, by any clock."""
MOST_CERTIFICATES = 1000
"""Certificates of one lab that a revocation list may have to name: a list that is too
long is taken by no lab (`revocation.MOST_BYTES`). A lab needs four a day."""
MOST_REQUEST_BYTES = 1 << 14  # a request for P-256 has 350
GRACE = datetime.timedelta(days=14)
"""A lab that was off, or could not reach the authority, may renew certificates that
expired so long ago, unless it was revoked."""

DATABASE = store_lib.Kind(
    "an authority",
    application=0,
    version=0,
    tables="""
CREATE TABLE invitations (
  digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
  lab TEXT NOT NULL,
  expires INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'used', 'withdrawn'))
) STRICT;
CREATE TABLE labs (
  name TEXT PRIMARY KEY,
  state TEXT NOT NULL CHECK (state IN ('member', 'revoked')),
  since INTEGER NOT NULL
) STRICT;
CREATE TABLE issued (
  serial TEXT PRIMARY KEY,
  lab TEXT NOT NULL,
  role TEXT NOT NULL,
  not_after INTEGER NOT NULL
) STRICT;
CREATE TABLE revoked (
  serial TEXT PRIMARY KEY REFERENCES issued (serial),
  since INTEGER NOT NULL
) STRICT;
CREATE TABLE revocation_list (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  number INTEGER NOT NULL,
  signed INTEGER NOT NULL,
  pem BLOB NOT NULL
) STRICT;
""",
)
"""Of a secret it has the SHA-256. Serial numbers (to 160 bits) are hexadecimal."""


class RequestRefused(site_folder.Refusal):
    """An error in a request for a certificate, or in who sends it."""


class LocalAuthority:
    """An authority whose key lies in the folder of a lab.

    Several processes may use it at once, such as a switch and a command.

    Args:
      folder: of the lab.
      lifetime: of the certificates that it issues.

    Attributes:
      lab: that it belongs to.
      fingerprint: of its certificate.

    Raises:
      FederationError: if it is not there, or others can read its key.
    """

    def __init__(
        self,
        folder: site_folder.Folder,
        lifetime: datetime.timedelta = issuing.LEAF_LIFETIME,
    ) -> None:
        folder.check()
        self._folder, self._lifetime = folder, lifetime
        try:
            pem = folder.authority_certificate.read_bytes()
            certificate = x509.load_pem_x509_certificate(pem)
            pem = folder.authority_key.read_bytes()
            key: Any = serialization.load_pem_private_key(pem, None)
            self.lab = member.issuing_lab(certificate)
        except FileNotFoundError:
            raise FederationError(
                f"{folder.path}: the authority is not in this folder; it is where"
                " `nebula init` was run"
            ) from None
        except (OSError, *site_folder.UNREADABLE, site_folder.Refusal) as error:
            text = " ".join(str(error).split())[:200]
            raise FederationError(f"{folder.authority}: {text}") from None
        if key.public_key() != certificate.public_key():
            raise FederationError(
                f"{folder.authority_key}: the key of another authority"
            )
        self._signer = certificates.Authority(certificate, key)
        self.fingerprint = site_folder.fingerprint(certificate)
        path = folder.authority_database
        store_lib.create(path, DATABASE)
        self._store = store_lib.Store(path, kind=DATABASE)
        if self.lab not in self.members():
            self.admit(self.lab)

    @classmethod
    def create(
        cls,
        folder: site_folder.Folder,
        lab: str,
        now: datetime.datetime | None = None,
        lifetime: datetime.timedelta = issuing.LEAF_LIFETIME,
    ) -> "LocalAuthority":
        """Makes an authority, with its lab as the first member.

        Args:
          folder: of the lab; it is made if missing.
          lab: the name of the lab, which is in the authority's certificate.
          now: the time; by default this machine's.
          lifetime: of the certificates that it will issue.

        Raises:
          FederationError: if there is one already, or it cannot be made.
        """
        site_folder.check_lab(lab)
        now = now or site_folder.utc_now()
        folder.prepare()
        if folder.authority.exists():
            raise FederationError(f"{folder.authority}: an authority is here already")
        signer = issuing.authority(ec.generate_private_key(ec.SECP256R1()), lab, now)
        try:
            with files.writing(folder.authority) as partial:
                _write(partial, signer)
        except OSError as error:
            raise FederationError(f"{folder.authority}: {error.strerror}") from None
        authority = cls(folder, lifetime)
        authority.revocation_list(now)
        return authority

    def close(self) -> None:
        """Closes the database."""
        self._store.close()

    def certificate(self) -> bytes:
        """Returns the authority's own certificate (PEM)."""
        return self._signer.certificate.public_bytes(serialization.Encoding.PEM)

    def invite(
        self, lab: str, address: str, now: datetime.datetime | None = None
    ) -> str:
        """Makes an invitation, which replaces an older one for the same lab.

        Args:
          lab: the name for which it serves.
          address: host:port at which the lab reaches the authority's switch.
          now: the time; by default this machine's.

        Returns:
          One line, which is secret.

        Raises:
          FederationError: if an argument does not serve.
        """
        now = now or site_folder.utc_now()
        site_folder.check_lab(lab)
        if not site_folder.is_address(address):
            raise FederationError(
                f"{address[:80]!r} is not host:port, as in lab-s.example:7070"
            )
        if lab == self.lab:
            raise FederationError(f"{lab} is this lab, and has the authority")
        with self._store.writing() as connection:
            made = invitations.invite(connection, lab, address, self.fingerprint, now)
        return made.text()

    def redeem(
        self,
        claim: invitations.Claim,
        lab: str,
        requests: Sequence[bytes],
        now: datetime.datetime | None = None,
    ) -> None:
        """Uses an invitation up, and admits the lab. Of two attempts at once one wins.

        A lab that is a member already gets other certificates: those that it had are
        revoked, since who invited it anew may know that others have their keys.

        Args:
          claim: made with the secret of the invitation, see `invitations.claim`.
          lab: the name under which its bearer wants to join.
          requests: of certificates (PEM), which it wants.
          now: the time; by default this machine's.

        Raises:
          invitations.InvitationRefused: if it does not serve; the reason is a key of
            `invitations.REASONS`.
        """
        now = now or site_folder.utc_now()
        listed = revocation.RevocationList(self._folder)
        with self._store.writing() as connection:
            is_member = invitations.state(connection, lab) == "member"
            reason = invitations.redeem(connection, claim, lab, requests, now)
            if is_member and not reason:
                self._revoke_certificates(connection, lab, now)
                self._sign_list(connection, listed, now)
        if reason:  # not in the transaction, which would forget the guess
            text = (
                f"{invitations.REASONS[reason]}; the authority's lab can make another"
            )
            raise invitations.InvitationRefused(reason, text)

    def admit(self, lab: str) -> None:
        """Makes a lab a member without an invitation, as the authority's own is."""
        site_folder.check_lab(lab)
        with self._store.writing() as connection:
            now = site_folder.utc_now()
            invitations.set_state(connection, lab, "member", now)

    def members(self) -> list[str]:
        """Returns the labs that are members, sorted."""
        query = "SELECT name FROM labs WHERE state = 'member' ORDER BY name"
        with self._store.writing() as connection:
            return [name for (name,) in connection.execute(query)]

    def renew(
        self, renewal: member.Renewal, now: datetime.datetime | None = None
    ) -> tuple[bytes, str, str]:
        """Issues a certificate to who has the key of a former one.

        Args:
          renewal: from anybody.
          now: the time; by default this machine's.

        Returns:
          The certificate (PEM), its lab and its role.

        Raises:
          RequestRefused: if the former certificate is not one of this authority, issued
            since the lab became a member, and valid within GRACE; or as `certify`.
        """
        now = now or site_folder.utc_now()
        try:
            former = x509.load_pem_x509_certificate(renewal.certificate)
            former.verify_directly_issued_by(self._signer.certificate)
            found = member.names_of(former)
            owner = site_folder.parse_name(found[0]) if len(found) == 1 else None
            is_owner = member.is_proof(former, renewal)
        except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
            owner, is_owner = None, False
        if owner is None or not is_owner:
            raise RequestRefused(
                "bad_signature",
                "the request is not signed with the key of a certificate of this"
                " federation",
            )
        lab, role = owner
        if now > former.not_valid_after_utc + GRACE:
            raise RequestRefused(
                "expired",
                f"the certificate of {found[0]} expired more than {GRACE.days} days"
                " ago; another invitation replaces it",
            )
        issued = former.not_valid_before_utc + issuing.BACKDATED
        with self._store.writing() as connection:
            since = invitations.member_since(connection, lab)
        if since is not None and int(issued.timestamp()) < since:
            raise RequestRefused(
                "revoked", f"the certificate of {found[0]} is from before {lab} joined"
            )
        return self.certify(renewal.csr, lab, role, now), lab, role

    def certify(
        self,
        csr_pem: bytes,
        lab: str,
        role: str,
        now: datetime.datetime | None = None,
    ) -> bytes:
        """Issues a certificate.

        Args:
          csr_pem: a request, from whom the caller has checked to be the lab.
          lab: a member.
          role: one of `site_folder.ROLES`.
          now: the time; by default this machine's.

        Returns:
          The certificate (PEM).

        Raises:
          RequestRefused: if the request does not serve, or the lab is no
            member or has MOST_CERTIFICATES, or there is no such role.
          store.StoreError: if the database does not serve.
        """
        now = now or site_folder.utc_now()
        if role not in site_folder.ROLES:
            raise RequestRefused("wrong_role", f"no lab has a {role[:80]!r}")
        key = requested_key(csr_pem)
        with self._store.writing() as connection:
            if invitations.state(connection, lab) != "member":
                raise RequestRefused(
                    "no_member",
                    f"{lab[:80]!r} is no member of this federation, or was revoked; it"
                    " needs an invitation",
                )
            count = connection.execute(
                "SELECT COUNT(*) FROM issued WHERE lab = ? AND not_after >= ?",
                (lab, int((now - LIST_MEMORY).timestamp())),
            ).fetchone()[0]
            if count >= MOST_CERTIFICATES:
                raise RequestRefused(
                    "too_many",
                    f"{lab} has {count} certificates, and gets no other until some of"
                    " them have expired",
                )
            name = site_folder.dns_name(lab, role)
            made = issuing.leaf(self._signer, key, name, now, self._lifetime)
            end = int(made.not_valid_after_utc.timestamp())
            connection.execute(
                "INSERT INTO issued VALUES (?, ?, ?, ?)",
                (f"{made.serial_number:x}", lab, role, end),
            )
        return made.public_bytes(serialization.Encoding.PEM)

    def revoke(self, lab: str, now: datetime.datetime | None = None) -> int:
        """Revokes the certificates of a lab, and withdraws its invitation.

        It gets no other until it has been invited anew.

        Args:
          lab: a member, or one that was; or one that was invited.
          now: the time; by default this machine's.

        Returns:
          The number of the new revocation list.

        Raises:
          FederationError: if the lab is none of these, or has the authority.
        """
        now = now or site_folder.utc_now()
        site_folder.check_lab(lab)
        if lab == self.lab:
            raise FederationError(
                f"{lab} has the authority and cannot be revoked; `nebula rotate` gives"
                " it new keys"
            )
        listed = revocation.RevocationList(self._folder)
        with self._store.writing() as connection:
            withdrawn = invitations.withdraw(connection, lab)
            has_come = invitations.state(connection, lab) is not None
            if not withdrawn and not has_come:
                raise FederationError(
                    f"{lab} is no member of this federation, and was not invited"
                )
            if has_come:
                invitations.set_state(connection, lab, "revoked", now)
            self._revoke_certificates(connection, lab, now)
            number, _ = self._sign_list(connection, listed, now)
        return number

    def _revoke_certificates(
        self, connection: sqlite3.Connection, lab: str, now: datetime.datetime
    ) -> None:
        seconds = int(now.timestamp())
        connection.execute(
            "INSERT OR IGNORE INTO revoked SELECT serial, ? FROM issued"
            " WHERE lab = ? AND not_after >= ?",
            (seconds, lab, seconds - int(LIST_MEMORY.total_seconds())),
        )

    def revocation_list(self, now: datetime.datetime | None = None) -> bytes:
        """Returns the newest revocation list (PEM).

        It is signed anew when it is a day old, or the lab has a newer one: then the
        authority has come back from a copy.

        Args:
          now: the time; by default this machine's.
        """
        now = now or site_folder.utc_now()
        listed = revocation.RevocationList(self._folder)
        with self._store.writing() as connection:
            query = "SELECT number, signed, pem FROM revocation_list"
            row = connection.execute(query).fetchone()
            age = now.timestamp() - row[1] if row else math.inf
            if row and row[0] >= listed.number and age < LIST_RENEWAL.total_seconds():
                return row[2]
            _, pem = self._sign_list(connection, listed, now)
        return pem

    def _sign_list(
        self,
        connection: sqlite3.Connection,
        listed: revocation.RevocationList,
        now: datetime.datetime,
    ) -> tuple[int, bytes]:
        """Signs the next revocation list; returns its number and it (PEM).

        It goes on from what the lab has: no lab takes a list with a lower number, and
        what was revoked there stays so, if the database has come back from a copy.
        """
        row = connection.execute("SELECT number FROM revocation_list").fetchone()
        number = 1 + max(row[0] if row else 0, listed.number)
        for serial, since in listed.revoked().items():
            begin, text = int(since.timestamp()), f"{serial:x}"
            end = begin + int(self._lifetime.total_seconds())  # it expires before that
            insert = "INSERT OR IGNORE INTO"
            connection.execute(f"{insert} issued VALUES (?, '', '', ?)", (text, end))
            connection.execute(f"{insert} revoked VALUES (?, ?)", (text, begin))
        rows = connection.execute(
            "SELECT serial, since FROM revoked JOIN issued USING (serial)"
            " WHERE not_after >= ?",
            (int((now - LIST_MEMORY).timestamp()),),
        ).fetchall()
        revoked = [
            (int(serial, 16), datetime.datetime.fromtimestamp(since, datetime.UTC))
            for serial, since in rows
        ]
        signed = issuing.revocation_list(self._signer, number, revoked, now)
        pem = signed.public_bytes(serialization.Encoding.PEM)
        connection.execute(
            "INSERT OR REPLACE INTO revocation_list VALUES (1, ?, ?, ?)",
            (number, int(now.timestamp()), pem),
        )
        return number, pem


def requested_key(csr_pem: bytes) -> Any:
    """Returns the public key of a request whose sender has the private one.

    Args:
      csr_pem: from anybody.

    Raises:
      RequestRefused: if it is no such request, or its key is weak.
    """
    try:
        if len(csr_pem) > MOST_REQUEST_BYTES:
            raise ValueError("it is too long")
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        strong = member.is_strong(key)
        valid = strong and request.is_signature_valid
    except site_folder.UNREADABLE:
        raise RequestRefused("malformed", "this is no certificate request") from None
    if not strong:
        raise RequestRefused(
            "weak_key", "the key of a request must be P-256, a longer one, or Ed25519"
        )
    if not valid:
        raise RequestRefused(
            "bad_signature", "the request was not signed with its own key"
        )
    return key


def _write(folder: pathlib.Path, signer: certificates.Authority) -> None:
    """Writes ca.pem, and key.pem for this user alone, into a new folder."""
    folder.mkdir(mode=0o700)
    pem = signer.certificate.public_bytes(serialization.Encoding.PEM)
    (folder / "ca.pem").write_bytes(pem)
    certificates.write_key(folder / "key.pem", certificates.key_pem(signer.key))
