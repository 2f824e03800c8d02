"""The revocation list as a lab has it: it never goes back, and never goes without.

The list is the authority's (RFC 5280), and its number is the epoch of revocation. The
highest number that was ever here is kept beside it, so that an older list is refused
after a restart as well. Only who restores a whole folder can undo a revocation here;
then the peers' higher epoch shows it. Without a list that is valid, nobody is admitted.
"""

import datetime
import pathlib
import re
import threading

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from nebula_jax import files
from nebula_jax.security.membership import member, site_folder

MOST_BYTES = 1 << 20
"""Bytes of a list: 10,000 certificates revoked within the days that they last."""
HASHES = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
"""Digests that a signature may be of; older ones can be forged."""
PEM = serialization.Encoding.PEM
_NUMBER = re.compile(rb"[0-9]{1,18}\n?")


class ListRefused(site_folder.Refusal):
    """An error in a revocation list, which does not take effect, or is missing."""


class RevocationList:
    """The newest revocation list of a lab, which several processes share.

    It is read again when another process has replaced it. With a list that does not
    serve every question raises, until `accept` has taken one that does: it is signed,
    so that it may come over a connection on which the peer is not checked for it.

    Args:
      folder: of the lab; it has credentials, and so the authority's certificate.
      role: whose list it is: trainers do not rely on the one that their switch has.

    Raises:
      site_folder.FederationError: if it has none, or the numbers cannot be read.
    """

    def __init__(self, folder: site_folder.Folder, role: str = "switch") -> None:
        self._folder = folder
        self._path = folder.list_of(role)
        self._number_path = self._path.with_suffix(".number")
        self._lock = threading.RLock()
        self._state: tuple[object, ...] | None = None
        self._list: x509.CertificateRevocationList | None = None
        self._problem = ListRefused("", "")  # why there is no list
        self._number = 0
        self._refresh()
        if self._number > self._highest():  # a crash came in between; see `accept`
            with folder.locked():
                self._keep_number(self._number)

    @property
    def number(self) -> int:
        """The epoch of revocation: the highest number of a list here; 0 without any."""
        with self._lock:
            self._refresh()
            return self._number

    def check(self, now: datetime.datetime | None = None) -> None:
        """Checks that there is a list that is valid now.

        Args:
          now: the time; by default this machine's.

        Raises:
          ListRefused: if not; nobody may be admitted then.
        """
        _check_period(self._present(), now or site_folder.utc_now())

    def is_revoked(self, serial: int) -> bool:
        """Returns True if the certificate with a serial number is revoked.

        Raises:
          ListRefused: if there is no list to look it up in.
        """
        found = self._present().get_revoked_certificate_by_serial_number(serial)
        return found is not None

    def revoked(self) -> dict[int, datetime.datetime]:
        """Returns serial number -> since when it is revoked; none without a list."""
        with self._lock:
            self._refresh()
            found = () if self._list is None else self._list
            return {each.serial_number: each.revocation_date_utc for each in found}

    def covers(self, pem: bytes) -> bool:
        """Returns True if all that a list of the authority revokes is revoked here."""
        found, _ = _verified(pem, member.pinned_authority(self._folder))
        return {each.serial_number for each in found} <= self.revoked().keys()

    def pem(self) -> bytes:
        """Returns the list, to be handed on.

        Raises:
          ListRefused: if there is none that serves.
        """
        return self._present().public_bytes(PEM)

    def accept(self, pem: bytes, now: datetime.datetime | None = None) -> bool:
        """Takes over a list that somebody sends, if it is a newer one.

        Args:
          pem: the list, from anybody.
          now: the time; by default this machine's.

        Returns:
          True if it is in force now; False if a newer one is, or it already was.

        Raises:
          ListRefused: if it is forged, damaged or no longer valid, or another one has
            its number.
          site_folder.FederationError: if the disk does not take it.
        """
        found, number = _verified(pem, member.pinned_authority(self._folder))
        with self._lock, self._folder.locked():
            self._refresh()
            if number < self._number:
                return False
            if number == self._number and self._list is not None:
                if self._list.tbs_certlist_bytes == found.tbs_certlist_bytes:
                    return False
                raise ListRefused(
                    "revocation_list_conflicting",
                    f"two revocation lists have the number {number}",
                )
            _check_period(found, now or site_folder.utc_now())
            try:
                # A crash in between leaves a list that is newer than the number, which
                # serves. What was sent besides the list is not written: OpenSSL would
                # trust a certificate that it found in this file.
                with files.writing(self._path) as partial:
                    partial.write_bytes(found.public_bytes(PEM))
                self._keep_number(number)
            except OSError as error:
                raise site_folder.FederationError(
                    f"{self._path}: {error.strerror}"
                ) from None
            self._refresh()
            return True

    def _refresh(self) -> None:
        """Reads the list again if its files have changed."""
        with self._lock:
            paths = (self._path, self._number_path)
            state = tuple(_state_of(path) for path in paths)
            if state == self._state:
                return
            highest = self._highest()
            self._list, self._number = None, highest
            try:
                self._list, self._number = self._read(highest)
            except ListRefused as error:
                self._problem = error
            self._state = state

    def _present(self) -> x509.CertificateRevocationList:
        with self._lock:
            self._refresh()
            if self._list is None:
                raise ListRefused(self._problem.reason, str(self._problem))
            return self._list

    def _read(self, highest: int) -> tuple[x509.CertificateRevocationList, int]:
        """Returns the list on the disk, and its number."""
        path = self._path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ListRefused(
                "revocation_list_missing",
                f"{path}: there is no revocation list ({error.strerror});"
                " nobody is admitted until the authority's switch has sent one",
            ) from None
        try:
            found, number = _verified(data, member.pinned_authority(self._folder))
        except ListRefused as error:
            raise ListRefused(error.reason, f"{path}: {error}") from None
        if data != found.public_bytes(PEM):
            raise ListRefused(
                "revocation_list_malformed", f"{path}: has more than a revocation list"
            )
        if number < highest:
            raise ListRefused(
                "revocation_list_rolled_back",
                f"{path}: is number {number}, but number {highest} was here already;"
                " nobody is admitted until the authority's switch has sent it again",
            )
        return found, number

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


def number_of(pem: bytes) -> int:
    """Returns the number of a list of this process's own authority."""
    found = x509.load_pem_x509_crl(pem).extensions
    return found.get_extension_for_class(x509.CRLNumber).value.crl_number


def _verified(
    pem: bytes, authority: x509.Certificate
) -> tuple[x509.CertificateRevocationList, int]:
    """Returns a list that the authority has signed, and its number; refuses others."""
    malformed = ListRefused("revocation_list_malformed", "this is no revocation list")
    if len(pem) > MOST_BYTES:
        raise malformed
    key = authority.public_key()
    try:
        found = x509.load_pem_x509_crl(pem)
        signed = (
            found.issuer == authority.subject
            and isinstance(found.signature_hash_algorithm, HASHES)
            and found.is_signature_valid(key)  # type: ignore[arg-type]
        )
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value
        partial = any(extension.critical for extension in found.extensions)
    except site_folder.UNREADABLE:
        raise malformed from None
    if not signed:
        raise ListRefused(
            "revocation_list_forged", "this revocation list is not the authority's"
        )
    # Critical are marks of a list of only a part of what is revoked.
    if partial or not 0 < number.crl_number < 10**18 or found.next_update_utc is None:
        raise malformed
    return found, number.crl_number


def _check_period(
    found: x509.CertificateRevocationList, now: datetime.datetime
) -> None:
    begin, end = found.last_update_utc, found.next_update_utc
    if now < begin:
        raise ListRefused(
            "revocation_list_not_yet_valid",
            f"the revocation list is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC; is"
            " this machine's clock right?",
        )
    assert end is not None  # `_verified` takes no other
    if now >= end:
        raise ListRefused(
            "revocation_list_expired",
            f"the revocation list expired at {end:%Y-%m-%d %H:%M} UTC; nobody is"
            " admitted until the authority's switch has sent another",
        )


def _state_of(path: pathlib.Path) -> tuple[int, ...] | None:
    """Returns what changes when a file is replaced; None without one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
