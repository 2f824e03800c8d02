"""The revocation list as a lab has it: it never goes back, and never goes without.

The authority signs for each lab that was revoked, or joined again, from when on its
certificates count: all that are valid from before are revoked. So a list is short, and
revokes what nobody knows of. Its number is the epoch of revocation. The highest number
that was ever here is kept beside it, so that an older list is refused after a restart
as well. Only who restores a whole folder can undo a revocation here; then the peers'
higher epoch shows it. Without a list that is valid, nobody is admitted.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nebula_jax import files, strict_json
from nebula_jax.security import private_files
from nebula_jax.security.membership import member, site_folder
from nebula_jax.security.tls import certificates

MOST_BYTES = 1 << 19  # of a list: 5,000 labs
_DIGEST = ec.ECDSA(hashes.SHA256())
_PURPOSE = b"nebula revocations 1\0"
_FIELDS = {"number": int, "begin": int, "end": int, "revoked": dict}
_SIGNED = re.compile(r"([ -~]+)\n((?:[0-9a-f]{2})+)\n((?:[0-9a-f]{2})+)\n")
_NUMBER = re.compile(rb"[0-9]{1,18}\n?")


class ListRefused(site_folder.Refusal):
    """An error in a revocation list, which does not take effect, or is missing."""


class Listed(NamedTuple):
    """A revocation list that the authority has signed. Times are unix seconds."""

    number: int  # greater than that of the list before
    begin: int
    end: int  # of its life
    revoked: Mapping[str, int]  # lab -> from when on its certificates have to be valid
    issued: int  # when the key that has signed it was made
    text: str  # as it was signed, to be handed on


def sign(
    signer: certificates.Authority,
    number: int,
    revoked: Mapping[str, int],
    begin: datetime.datetime,
    end: datetime.datetime,
) -> str:
    """Signs a list; for the other arguments see `Listed`."""
    life = {"begin": int(begin.timestamp()), "end": int(end.timestamp())}
    body = json.dumps({"number": number, **life, "revoked": dict(revoked)})
    signature = signer.key.sign(_PURPOSE + body.encode(), _DIGEST).hex()
    shown = signer.certificate.public_bytes(serialization.Encoding.DER).hex()
    return f"{body}\n{signature}\n{shown}\n"


class RevocationList:
    """The newest revocation list of a lab, which several processes share.

    It is read for each question: another process may have replaced it. With a list that
    does not serve every question raises, until `accept` has taken one that does: it is
    signed, so that it may come over a connection on which the peer is not checked.

    `folder` is the lab's, with credentials, and so the authority's certificate; `role`
    is whose list it is: trainers do not rely on their switch's. Raises
    site_folder.FederationError if there is none, or the numbers cannot be read.
    """

    def __init__(self, folder: site_folder.Folder, role: str = "switch") -> None:
        self._folder = folder
        self._path = folder.list_of(role)
        self._number_path = self._path.with_suffix(".number")
        self._lock_path = folder.path / ".lock"
        if self.number > self._highest():  # a crash came in between; see `accept`
            with private_files.locked(self._lock_path):
                self._keep_number(self.number)

    @property
    def number(self) -> int:
        """The epoch of revocation: the highest number of a list here; 0 without any."""
        found, highest = self.newest(), self._highest()
        return found.number if found else highest

    def newest(self) -> Listed | None:
        """Returns the list; None if there is none that serves."""
        try:
            return self.present()
        except ListRefused:
            return None

    def present(self) -> Listed:
        """Returns the list; raises ListRefused if there is none that serves."""
        path = self._path
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise ListRefused(
                "revocation_list_missing",
                f"{path}: there is no revocation list ({error.strerror});"
                " nobody is admitted until the authority's switch has sent one",
            ) from None
        try:
            found = _verified(text, self._authority)
        except ListRefused as error:
            raise ListRefused(error.reason, f"{path}: {error}") from None
        if found.number < (highest := self._highest()):
            raise ListRefused(
                "revocation_list_rolled_back",
                f"{path}: is number {found.number}, but number {highest} was here"
                " already; nobody is admitted until the authority's switch has sent it"
                " again",
            )
        return found

    def check(self) -> None:
        """Raises ListRefused unless there is a valid list: nobody is admitted then."""
        _check_period(self.present())

    def is_revoked(self, lab: str, begin: datetime.datetime) -> bool:
        """Returns True if a certificate from `begin` is revoked; raises ListRefused."""
        return begin.timestamp() < self.present().revoked.get(lab, 0)

    def revoked(self) -> Mapping[str, int]:
        """Returns `Listed.revoked`, without a list none."""
        found = self.newest()
        return found.revoked if found else {}

    def accept(self, text: str) -> bool:
        """Takes over a list that somebody sends, if it is a newer one.

        Returns True if it is in force now; False if a newer one is, or it already was.
        Raises ListRefused if it is forged, damaged or no longer valid, or another one
        has its number; site_folder.FederationError if the disk does not take it.
        """
        found = _verified(text, self._authority)
        with private_files.locked(self._lock_path):
            if found.number < self.number:
                return False
            present = self.newest()
            if present is not None and present.number == found.number:
                if present[:-1] == found[:-1]:
                    return False
                raise ListRefused(
                    "revocation_list_conflicting",
                    f"two revocation lists have the number {found.number}",
                )
            if present is not None and found.issued < present.issued:
                raise ListRefused(
                    "revocation_list_superseded",
                    "the key that has signed this revocation list was replaced",
                )
            _check_period(found)
            try:
                # A crash in between leaves a list newer than the number, which serves.
                with files.writing(self._path) as partial:
                    partial.write_text(found.text, "ascii")
                self._keep_number(found.number)
            except OSError as error:
                raise site_folder.FederationError(
                    f"{self._path}: {error.strerror}"
                ) from None
            return True

    @functools.cached_property
    def _authority(self) -> x509.Certificate:
        return member.pinned_authority(self._folder)

    def _keep_number(self, number: int) -> None:
        """Writes the highest number, while the folder is locked."""
        if number > self._highest():
            with files.writing(self._number_path) as partial:
                partial.write_text(f"{number}\n", "ascii")

    def _highest(self) -> int:
        path = self._number_path
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise site_folder.FederationError(f"{path}: {error.strerror}") from None
        if not _NUMBER.fullmatch(text):
            raise site_folder.FederationError(f"{path}: has no number")
        return int(text)


@functools.lru_cache(16)  # it is asked often, and a signature takes 0.1 ms
def _verified(text: str, root: x509.Certificate) -> Listed:
    """Returns a list that the authority has signed; refuses others."""
    malformed = ListRefused("revocation_list_malformed", "this is no revocation list")
    found = _SIGNED.fullmatch(text) if len(text) <= MOST_BYTES else None
    if found is None:
        raise malformed
    body, signature, shown = found[1], *map(bytes.fromhex, found.groups()[1:])
    try:
        signer = x509.load_der_x509_certificate(shown)
        signer.verify_directly_issued_by(root)  # which certificates of labs are not
        key: Any = signer.public_key()
        key.verify(signature, _PURPOSE + body.encode(), _DIGEST)
    except (*site_folder.UNREADABLE, exceptions.InvalidSignature):
        raise ListRefused(
            "revocation_list_forged", "this revocation list is not the authority's"
        ) from None
    fields = strict_json.loads(body)
    if {name: type(each) for name, each in fields.items()} != _FIELDS:
        raise malformed
    issued = int(signer.not_valid_before_utc.timestamp())
    return Listed(**fields, issued=issued, text=text)


def _check_period(found: Listed) -> None:
    utc, now = datetime.UTC, site_folder.utc_now()
    begin, end = (
        datetime.datetime.fromtimestamp(each, utc) for each in (found.begin, found.end)
    )
    if now < begin:
        raise ListRefused(
            "revocation_list_not_yet_valid",
            f"the revocation list is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC; is"
            " this machine's clock right?",
        )
    if now >= end:
        raise ListRefused(
            "revocation_list_expired",
            f"the revocation list expired at {end:%Y-%m-%d %H:%M} UTC; nobody is"
            " admitted until the authority's switch has sent another",
        )
