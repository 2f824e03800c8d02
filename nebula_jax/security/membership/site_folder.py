"""The folder of a lab in a federation: its paths, its settings, and who may read it.

A federation is labs that train together. A lab has one switch, which alone has an
outside address, and any number of trainers. Both have keys and certificates of their
own: a switch reads neither trainers/ nor authority/. Trainers that are another user's,
or on another host, have a folder of their own with trainers/, federation.json,
policy.json and the way to the switch: a link switch.sock to the socket that it has for
them, or its inside/, by a mount or a link.

    federation.json   name of this lab, address and fingerprint of the authority
    switch.pem        the newest credentials: key, certificate, that of the authority
    revoked.json      the newest revocation list; revoked.number is its number
    people.json       accounts, handles, grants
    audit/            the log of this lab, and what it has witnessed of its peers
    inside/           switch.json: address and token of the running switch
    carried.json      what the running switch has counted, for the next one
    prepared/         tokenized text that is served
    trainers/         trainer.pem, likewise; a list; epochs/: incarnations
    authority/        only at the lab that issues certificates: authority.pem, its key;
                      root.pem, that of the root, which has its place elsewhere
"""

import dataclasses
import datetime
import json
import pathlib
import re
from collections.abc import Sequence

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes

from nebula_jax import errors, files, strict_json
from nebula_jax.security import names, private_files

VERSION = 6  # of the files of a folder
ROLES = ("switch", "trainer")  # the parts of a lab with a certificate of their own

UNREADABLE = (
    *(ValueError, TypeError, exceptions.UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.ExtensionNotFound, x509.DuplicateExtension),
    x509.UnsupportedGeneralNameType,
)
"""The errors of `cryptography` for bytes that are not what they are read as."""

MOST_ADDRESS_CHARACTERS = 255 + 8  # of a DNS name, brackets, a colon and a port
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]"
_ADDRESS = re.compile(rf"(?:{_HOST}):([1-9][0-9]{{0,4}})")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class FederationError(errors.NebulaError):
    """An error in this lab's own folder, or in what was to be done with it."""


class Refusal(errors.NebulaError):
    """An error of another party: what it sent or showed must not be used."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason  # one word for the audit log, such as `expired`


@dataclasses.dataclass(frozen=True)
class Settings:
    """The contents of federation.json."""

    name: str  # of this lab
    authority: str  # host:port of the lab that issues certificates; "" at that lab
    fingerprint: str  # SHA-256 of the authority's certificate (DER), in hexadecimal
    version: int = VERSION  # of the files of the folder


class Folder:
    """The folder of a lab. No path in it is made up anywhere else."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.settings = path / "federation.json"
        # At the lab that issues certificates alone.
        self.authority = path / "authority"
        self.authority_key = self.authority / "authority.pem"
        self.root_key = self.authority / "root.pem"
        self.authority_ledger = self.authority / "ledger.json"
        # The newest credentials.
        self.trainers = path / "trainers"
        self.switch = self.credentials("switch")
        self.trainer = self.credentials("trainer")
        self.people = path / "people.json"
        self.audit = path / "audit"
        self.epochs = self.trainers / "epochs"
        self.inside = path / "inside"
        self.running_switch = self.inside / "switch.json"
        self.carried = path / "carried.json"
        self.socket = path / "switch.sock"
        self.prepared = path / "prepared"

    def of(self, role: str) -> pathlib.Path:
        """Returns the folder of a role, one of ROLES, or of the `authority`."""
        roles = {"switch": self.path, "trainer": self.trainers}
        return {**roles, "authority": self.authority}[role]

    def credentials(self, role: str) -> pathlib.Path:
        """Returns the path of the credentials of a role, one of ROLES."""
        return self.of(role) / f"{role}.pem"

    def list_of(self, role: str) -> pathlib.Path:
        """Returns the path of the revocation list that a role, or `authority`, has."""
        return self.of(role) / "revoked.json"

    def prepare(self) -> None:
        """Makes all folders, for this user alone; raises FederationError if not."""
        try:
            made = (self.path, self.audit, self.trainers, self.epochs, self.inside)
            for folder in made:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FederationError(f"{self.path}: {error.strerror}") from None
        self.check()
        for folder in (self.path, self.trainers):  # which may be moved elsewhere
            ignore(folder)

    def create(
        self,
        name: str,
        authority: str = "",
        fingerprint: str = "",
        is_back: bool = False,
    ) -> Settings:
        """Makes the folder of a lab that founds a federation, or joins one.

        Until there are credentials in it, a second attempt replaces the first.
        `authority` is the host:port of the lab that issues certificates, "" if it is
        this one; `fingerprint` is of the authority's certificate. With `is_back` the
        same lab is here, and is to get other credentials. Returns what is in
        federation.json now. Raises FederationError if an argument does not serve, or a
        lab is here already.
        """
        check_lab(name)
        settings = _checked(Settings(name, authority, fingerprint), self.settings)
        has_credentials = any(self.credentials(role).exists() for role in ROLES)
        if self.settings.exists() and has_credentials and not is_back:
            raise FederationError(
                f"{self.path}: the lab {self.load().name} is here already; choose"
                " another folder"
            )
        self.prepare()
        text = json.dumps(dataclasses.asdict(settings), indent=2)
        with files.writing(self.settings) as partial:
            partial.write_text(text + "\n", "utf-8")
        return settings

    def load(self) -> Settings:
        """Reads federation.json after `check`; raises FederationError if it cannot."""
        self.check()
        try:
            found = strict_json.loads(self.settings.read_bytes())
        except FileNotFoundError:
            raise FederationError(
                f"{self.path}: no lab of a federation is here: it has no"
                " federation.json; begin with `nebula init` or `nebula join`"
            ) from None
        except (OSError, ValueError) as error:
            raise FederationError(f"{self.settings}: {error}") from None
        if isinstance(found, dict) and found.get("version") != VERSION:
            raise FederationError(
                f"{self.path}: is of another version of Nebula-JAX, whose keys and"
                " logs this one cannot read: go on with that version, or begin anew"
                " in another folder by `nebula init` or `nebula join`"
            )
        fields = {each.name for each in dataclasses.fields(Settings)}
        if not isinstance(found, dict) or set(found) != fields:
            raise FederationError(f"{self.settings}: must have {sorted(fields)}")
        return _checked(Settings(**found), self.settings)

    def check(self) -> None:
        """Raises PrivateFileError, with what mends it, if others can read secrets."""
        for path in self._secrets():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise FederationError(f"{path}: {error.strerror}") from None
            private_files.check_mode(path, found)

    def _secrets(self) -> Sequence[pathlib.Path]:
        keys = (self.credentials(role) for role in ROLES)
        folders = (self.path, self.authority, self.trainers, self.audit)
        kept = (self.authority_key, self.root_key, self.authority_ledger, self.people)
        written = (self.audit / "key.pem", self.running_switch, self.epochs)
        return (*folders, *keys, *kept, *written)


def ignore(folder: pathlib.Path) -> None:
    """Keeps the keys in a folder out of a repository around it."""
    (folder / ".gitignore").write_text("*\n", "utf-8")


def utc_now() -> datetime.datetime:
    """Returns the time by this machine's clock."""
    return datetime.datetime.now(datetime.UTC)


def is_lab(name: str) -> bool:
    """Returns True if a lab may have this name: a cluster's, without a colon."""
    return names.is_cluster(name) and ":" not in name


def check_lab(name: str) -> None:
    """Raises FederationError if no lab may have a name."""
    if not is_lab(name):
        raise FederationError(
            f"{name[:80]!r} is no lab's name: those have up to {names.MOST_CHARACTERS}"
            " small letters, digits and -, as in lab-s"
        )


def trainer_name(lab: str) -> str:
    """Returns the DNS name of a lab's trainers.

    >>> trainer_name("lab-s")
    'trainer.lab-s'
    """
    return f"trainer.{lab}"


def dns_name(lab: str, role: str) -> str:
    """Returns the only DNS name of the certificate of a role, one of ROLES."""
    return {"switch": lab, "trainer": trainer_name(lab)}[role]


def parse_name(name: str) -> tuple[str, str] | None:
    """Returns lab and role of a DNS name; None if it is nobody's.

    >>> parse_name("trainer.lab-s")
    ('lab-s', 'trainer')
    """
    lab = name.removeprefix("trainer.")
    role = "switch" if lab == name else "trainer"
    return (lab, role) if is_lab(lab) else None


def is_address(text: str) -> bool:
    """Returns True if a text is host:port."""
    found = _ADDRESS.fullmatch(text)
    is_short = len(text) <= MOST_ADDRESS_CHARACTERS
    return is_short and found is not None and int(found[1]) < 1 << 16


def is_fingerprint(text: str) -> bool:
    """Returns True if a text has the form of a fingerprint."""
    return bool(_FINGERPRINT.fullmatch(text))


def fingerprint(certificate: x509.Certificate) -> str:
    """Returns the SHA-256 of a certificate (DER), in hexadecimal."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def _checked(settings: Settings, path: pathlib.Path) -> Settings:
    """Returns settings; raises FederationError if they cannot be right."""
    values = settings.name, settings.authority, settings.fingerprint
    if not all(isinstance(each, str) for each in values):
        raise FederationError(f"{path}: its values must be texts")
    check_lab(settings.name)
    if settings.authority and not is_address(settings.authority):
        raise FederationError(
            f"{path}: the authority {settings.authority[:80]!r} is not host:port, as in"
            " lab-s.example:7070"
        )
    if not is_fingerprint(settings.fingerprint):
        raise FederationError(
            f"{path}: the authority's fingerprint must have 64 hexadecimal digits"
        )
    return settings
