"""The authority of a federation: it issues certificates, and revokes them.

It lies in the folder of the lab that founded the federation. Its key is signed by that
of a root, which all labs trust, and can be replaced by it; the root's is needed for
nothing else.

The authority decides names. What a request has in it besides its key does not count: a
certificate is for a lab and a role, and a lab gets one while it is a member. Requests
come by way of switches, of which none is believed: an invitation's secret, or the key
of the former certificate, vouches for every one.
"""

import datetime
import hmac
from collections.abc import Sequence
from typing import Any, NamedTuple

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import serialization

from nebula_jax import files
from nebula_jax.security import private_files, store
from nebula_jax.security.membership import (
    invitations,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.membership.site_folder import FederationError
from nebula_jax.security.tls import certificates, credentials

ROOT_LIFETIME = datetime.timedelta(days=3650)  # with another, all labs would join anew
ISSUER_LIFETIME = datetime.timedelta(days=365)
"""The key that issues is online. Its root, kept offline, replaces it in time; see
`checkup.issuer`."""
LEAF_LIFETIME = datetime.timedelta(days=5)
"""Certificates are a day old when they are renewed: so runs go on while the authority
is away for four days. A stolen key serves for so long, unless it is revoked."""
LIST_LIFETIME = LEAF_LIFETIME
"""A lab that has had no newer revocation list for so long admits nobody. The list is
signed anew every day: it is the short-lived status of certificates that live longer."""
LIST_RENEWAL = datetime.timedelta(days=1)  # age at which a list is signed anew
MOST_REQUEST_BYTES = 1 << 14  # a request for P-256 has 350
GRACE = datetime.timedelta(days=14)
"""A lab that was off, or could not reach the authority, may renew certificates that
expired so long ago, unless it was revoked. Then it needs an invitation."""

Ledger = store.Tables
"""What the authority remembers: open invitations by the digests of their secrets (lab,
end), and labs (state, from when on their certificates count, and from when on the
newest is valid). Times are unix seconds."""
PARTS = ("invitations", "labs")


class _Keys(NamedTuple):
    """The keys of an authority."""

    signer: certificates.Authority  # the one that issues
    issuers: Sequence[x509.Certificate]  # of that and all before, newest first
    root: x509.Certificate


class LocalAuthority:
    """An authority whose key lies in the folder of a lab.

    Several processes may use it at once, such as a switch and a command: a change is
    made under a lock, and is on the disk, whole or not at all, when it is done. `lab`
    is whose it is, `fingerprint` its certificate's. Raises FederationError if it is not
    there, or others can read its key.
    """

    def __init__(self, folder: site_folder.Folder) -> None:
        folder.check()
        if folder.settings.exists():
            folder.load()  # which refuses that of another version
        self._folder = folder
        self._ledger = store.Store(folder.authority_ledger, PARTS)
        self.lab = member.issuing_lab(self._keys().root)
        self.fingerprint = site_folder.fingerprint(self._keys().root)
        self._ledger.read()  # what is wrong with it is named at once

    def _keys(self) -> "_Keys":
        """Reads the keys: a command may have replaced them."""
        folder = self._folder
        try:
            pem = folder.authority_key.read_bytes()
            key: Any = serialization.load_pem_private_key(pem, None)
            *issuers, root = x509.load_pem_x509_certificates(pem)
            return _Keys(certificates.Authority(issuers[0], key), issuers, root)
        except FileNotFoundError:
            raise FederationError(
                f"{folder.path}: the authority is not in this folder; it is where"
                " `nebula init` was run"
            ) from None
        except (OSError, IndexError, *site_folder.UNREADABLE) as error:
            text = " ".join(str(error).split())[:200]
            raise FederationError(f"{folder.authority_key}: {text}") from None

    @classmethod
    def create(
        cls, folder: site_folder.Folder, lab: str, log_key: bytes
    ) -> "LocalAuthority":
        """Makes an authority, with its lab as the first member.

        The name of the lab is in the authority's certificate, and so is `log_key`, the
        public key of the lab's audit log: peers refuse what has no receipt of that log.
        `folder` is made if missing. Raises FederationError if an authority is there, or
        cannot be made.
        """
        site_folder.check_lab(lab)
        folder.prepare()
        if folder.authority.exists():
            raise FederationError(f"{folder.authority}: an authority is here already")
        now = site_folder.utc_now()
        begin = now - member.BACKDATED
        root = certificates.authority(begin, now + ROOT_LIFETIME, lab, log_key)
        end = now + ISSUER_LIFETIME
        made = certificates.authority(begin, end, lab, root=root)
        chain = (made.certificate, root.certificate)
        try:
            with files.writing(folder.authority) as partial:
                partial.mkdir(mode=0o700)
                site_folder.ignore(partial)
                text = certificates.pem(root.key, root.certificate).decode()
                private_files.write(partial / folder.root_key.name, text)
                text = certificates.pem(made.key, *chain).decode()
                private_files.write(partial / folder.authority_key.name, text)
                store.Store(partial / folder.authority_ledger.name, PARTS).create()
        except OSError as error:
            raise FederationError(f"{folder.authority}: {error.strerror}") from None
        issuer = cls(folder)
        issuer.admit(lab)
        return issuer

    def certificate(self) -> bytes:
        """Returns the certificate (PEM) of the root, which labs trust."""
        return self._keys().root.public_bytes(serialization.Encoding.PEM)

    def replace_key(self, root_pem: bytes) -> int:
        """Replaces the key that issues; returns the number of a list of the new key.

        Lists that the former key signs are refused from then on; its certificates serve
        until labs renew them. `root_pem` is the root's key and certificate, as `create`
        wrote them. Raises FederationError if that is another root, or the list cannot
        be put in.
        """
        before = self._keys()
        try:
            key: Any = serialization.load_pem_private_key(root_pem, None)
            is_root = key.public_key() == before.root.public_key()
        except site_folder.UNREADABLE:
            is_root = False
        if not is_root:
            raise FederationError("this is not the key of the federation's root")
        now, second = site_folder.utc_now(), datetime.timedelta(seconds=1)
        begin = before.signer.certificate.not_valid_before_utc + second
        begin = max(begin, now - member.BACKDATED)
        end = min(now + ISSUER_LIFETIME, before.root.not_valid_after_utc)
        root = certificates.Authority(before.root, key)
        made = certificates.authority(begin, end, self.lab, root=root)
        chain = (made.certificate, *before.issuers, before.root)
        text = certificates.pem(made.key, *chain).decode()
        with self._ledger.changing() as ledger:
            private_files.write(self._folder.authority_key, text)
            return self._sign_list(ledger).number

    def invite(self, lab: str, address: str) -> str:
        """Makes an invitation, which replaces an older one for the same lab.

        Returns one line, which is secret. `lab` is the name for which it serves, this
        one's own at its own switch alone; `address` the host:port at which the lab
        reaches the authority's switch. Raises FederationError if an argument does not
        serve.
        """
        site_folder.check_lab(lab)
        if not site_folder.is_address(address):
            raise FederationError(
                f"{address[:80]!r} is not host:port, as in lab-s.example:7070"
            )
        made = invitations.new(lab, address, self.fingerprint)
        number, end = invitations.digest(made.secret).hex(), made.expires.timestamp()
        with self._ledger.changing() as ledger:
            _withdraw(ledger, lab)
            ledger["invitations"][number] = {"lab": lab, "end": int(end)}
        return made.text()

    def redeem(
        self, claim: invitations.Claim, lab: str, requests: Sequence[bytes]
    ) -> None:
        """Uses an invitation up, and admits the lab. Of two attempts at once one wins.

        A lab that is a member already gets other certificates: those that it had are
        revoked, since who invited it anew may know that others have their keys. `claim`
        is made with the secret of the invitation (`invitations.claim`); its bearer
        wants to join as `lab`, with certificates for `requests` (PEM). Raises
        site_folder.Refusal if it does not serve; the reason is a key of
        `invitations.REASONS`.
        """
        with self._ledger.changing() as ledger:
            if reason := _refusal(ledger, claim, lab, requests):
                raise site_folder.Refusal(
                    reason,
                    f"{invitations.REASONS[reason]}; the authority's lab can make"
                    " another",
                )
            _withdraw(ledger, lab)
            if _state(ledger, lab) == "member":
                _revoke(ledger, lab)
                self._sign_list(ledger)
            _set_state(ledger, lab, "member")

    def admit(self, lab: str) -> None:
        """Makes a lab a member without an invitation, as the authority's own is."""
        site_folder.check_lab(lab)
        with self._ledger.changing() as ledger:
            _set_state(ledger, lab, "member")

    def members(self) -> list[str]:
        """Returns the labs that are members, sorted."""
        labs = self._ledger.read()["labs"]
        return sorted(lab for lab in labs if labs[lab]["state"] == "member")

    def renew(self, renewal: member.Renewal) -> tuple[bytes, str, str]:
        """Issues a certificate to who has the key of a former one.

        Returns the certificate (PEM), its lab and its role. Raises site_folder.Refusal
        if the former one is not this authority's, valid within GRACE and not revoked;
        or as `certify`.
        """
        try:
            keys = self._keys()
            former = x509.load_pem_x509_certificate(renewal.certificate)
            is_issued = any(_is_issued(former, each) for each in keys.issuers)
            found = credentials.names_of(former)
            owner = site_folder.parse_name(found[0]) if len(found) == 1 else None
            member.check_proof(former, renewal)
        except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
            owner = None
        if owner is None or not is_issued:
            raise site_folder.Refusal(
                "bad_signature",
                "the request is not signed with the key of a certificate of this"
                " federation",
            )
        if not certificates.is_logged(former, keys.root):
            raise site_folder.Refusal(
                "unlogged", f"the certificate of {found[0]} is not in this lab's log"
            )
        lab, role = owner
        if site_folder.utc_now() > former.not_valid_after_utc + GRACE:
            raise site_folder.Refusal(
                "expired",
                f"the certificate of {found[0]} expired more than {GRACE.days} days"
                " ago; another invitation replaces it",
            )
        begin = former.not_valid_before_utc
        known = self._ledger.read()["labs"].get(lab, {"begin": 0})
        # The lab's own list knows more than a ledger that has come back from a copy.
        listed = revocation.RevocationList(self._folder).revoked().get(lab, 0)
        if begin.timestamp() < max(known["begin"], listed):
            text = f"the certificate of {found[0]} was revoked"
            raise site_folder.Refusal("revoked", text)
        return self.certify(renewal.csr, lab, role), lab, role

    def certify(self, csr_pem: bytes, lab: str, role: str) -> bytes:
        """Issues a certificate, which peers refuse until `attach`.

        `csr_pem` is a request, from whom the caller has checked to be the lab. Returns
        the certificate (PEM), and that of the key which has signed it. Raises
        site_folder.Refusal if the request does not serve, or the lab is no member;
        errors.NebulaError if the disk does not take it.
        """
        key, now = requested_key(csr_pem), site_folder.utc_now()
        with self._ledger.changing() as ledger:
            if _state(ledger, lab) != "member":
                raise site_folder.Refusal(
                    "no_member",
                    f"{lab[:80]!r} is no member of this federation, or was revoked; it"
                    " needs an invitation",
                )
            known = ledger["labs"][lab]
            # Not earlier, by whatever clock: it would be revoked.
            first = datetime.datetime.fromtimestamp(known["begin"], datetime.UTC)
            begin = max(now - member.BACKDATED, first)
            known["newest"] = max(known["newest"], int(begin.timestamp()))
        name = x509.DNSName(site_folder.dns_name(lab, role))
        signer = self._keys().signer
        end = min(now + LEAF_LIFETIME, signer.certificate.not_valid_after_utc)
        if end <= now:
            raise site_folder.Refusal(
                "expired",
                f"the key that issues certificates ended on {end:%Y-%m-%d}: the"
                " authority's lab has to replace it by nebula rekey root.pem",
            )
        return _chain(signer, certificates.leaf(signer, key, name, begin, end))

    def attach(self, certificate_pem: bytes, receipt: bytes) -> bytes:
        """Puts a receipt into a certificate that was issued; a wrong one is no use.

        Raises site_folder.Refusal if this authority has not issued it.
        """
        signer = self._keys().signer
        try:
            made = x509.load_pem_x509_certificate(certificate_pem)
            made.verify_directly_issued_by(signer.certificate)
            return _chain(signer, certificates.with_receipt(signer, made, receipt))
        except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
            text = "this is no certificate of the authority"
            raise site_folder.Refusal("bad_signature", text) from None

    def revoke(self, lab: str) -> int:
        """Revokes the certificates of a lab; returns the number of the new list.

        It gets no other until it has been invited anew: an invitation is withdrawn.
        Raises FederationError if it was never a member nor invited, or has the
        authority.
        """
        site_folder.check_lab(lab)
        if lab == self.lab:
            raise FederationError(
                f"{lab} has the authority and cannot be without certificates: what"
                f" `nebula invite {lab}` makes, given to `nebula join` in its own"
                " folder, replaces them and revokes all of before"
            )
        with self._ledger.changing() as ledger:
            was_invited = _withdraw(ledger, lab)
            if _state(ledger, lab) is not None:
                _set_state(ledger, lab, "revoked")
                _revoke(ledger, lab)
            elif not was_invited:
                raise FederationError(
                    f"{lab} is no member of this federation, and was not invited"
                )
            return self._sign_list(ledger).number

    def revocation_list(self) -> tuple[int, str]:
        """Returns the newest revocation list, its number and its text.

        It is signed anew when it is a day old, or the lab has a newer one: then the
        authority has come back from a copy.
        """
        now = site_folder.utc_now()
        oldest = (now - LIST_RENEWAL - member.BACKDATED).timestamp()
        with self._ledger.changing() as ledger:
            own, labs = self._lists()
            found = own.newest()
            if found is None or found.number < labs.number or found.begin <= oldest:
                found = self._sign_list(ledger)
            return found.number, found.text

    def _lists(self) -> Sequence[revocation.RevocationList]:
        """Returns the authority's own list, and that of the folder around it."""
        roles = ("authority", "switch")
        return [revocation.RevocationList(self._folder, role) for role in roles]

    def _sign_list(self, ledger: Ledger) -> revocation.Listed:
        """Signs the next revocation list, and puts it into the folder.

        It goes on from what is there: no lab takes a list with a lower number, and what
        was revoked stays so, if the authority has come back from a copy.
        """
        lists = self._lists()
        for lab, since in (both for each in lists for both in each.revoked().items()):
            if _state(ledger, lab) is None:
                _set_state(ledger, lab, "revoked")
            known = ledger["labs"][lab]
            known["begin"] = max(known["begin"], since)
        labs, now = ledger["labs"].items(), site_folder.utc_now()
        revoked = {lab: each["begin"] for lab, each in labs if each["begin"]}
        begin, end = now - member.BACKDATED, now + LIST_LIFETIME
        number = 1 + max(each.number for each in lists)
        text = revocation.sign(self._keys().signer, number, revoked, begin, end)
        for each in lists:
            if not each.accept(text):
                raise FederationError(
                    f"list {number} is not in force: another process has put in a"
                    " newer one; try again"
                )
        return lists[0].present()


def _chain(signer: certificates.Authority, made: x509.Certificate) -> bytes:
    """Returns a certificate and that of its issuer (PEM)."""
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem) + signer.certificate.public_bytes(pem)


def _is_issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, exceptions.InvalidSignature):
        return False
    return True


def requested_key(csr_pem: bytes) -> Any:
    """Returns the public key of a request whose sender has the private one.

    `csr_pem` is from anybody. Raises site_folder.Refusal if it is no such request, or
    its key is weak.
    """
    try:
        if len(csr_pem) > MOST_REQUEST_BYTES:
            raise ValueError("it is too long")
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        strong = credentials.is_strong(key)
        valid = strong and request.is_signature_valid
    except site_folder.UNREADABLE:
        raise site_folder.Refusal(
            "malformed", "this is no certificate request"
        ) from None
    if not strong:
        raise site_folder.Refusal("weak_key", "the key of a request must be P-256")
    if not valid:
        raise site_folder.Refusal(
            "bad_signature", "the request was not signed with its own key"
        )
    return key


def _refusal(
    ledger: Ledger, claim: invitations.Claim, lab: str, requests: Sequence[bytes]
) -> str:
    """Returns why an invitation that is claimed does not serve; empty if it does."""
    now = site_folder.utc_now().timestamp()
    for text, made in ledger["invitations"].items():
        key = bytes.fromhex(text)
        if invitations.digest(key) != claim.number:
            continue
        if made["lab"] != lab:
            return "wrong_name"
        right = invitations.claim_by(key, lab, requests)
        if not hmac.compare_digest(right.mac, claim.mac):
            break
        return "expired" if now >= made["end"] else ""
    return "unknown"


def _withdraw(ledger: Ledger, lab: str) -> bool:
    """Withdraws the invitation of a lab; returns True if it had one."""
    before = ledger["invitations"]
    kept = {key: each for key, each in before.items() if each["lab"] != lab}
    ledger["invitations"] = kept
    return len(kept) < len(before)


def _state(ledger: Ledger, lab: str) -> str | None:
    """Returns `member` or `revoked`; None of a lab that has never come."""
    return ledger["labs"].get(lab, {}).get("state")


def _set_state(ledger: Ledger, lab: str, state: str) -> None:
    ledger["labs"].setdefault(lab, {"begin": 0, "newest": 0})["state"] = state


def _revoke(ledger: Ledger, lab: str) -> None:
    """Revokes all that a lab has: of this second too, and of a clock that was ahead."""
    known, now = ledger["labs"][lab], site_folder.utc_now() - member.BACKDATED
    known["begin"] = 1 + max(int(now.timestamp()), known["newest"])
