"""Checkpoints of a log as signed text, in C2SP's formats.

    nebula/lab-s                                      the log's name, its "origin"
    60                                                entries
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=      root of their Merkle tree

    — nebula/lab-s Az3grlgtzPICa5OS...                the lab's signature
    — nebula/lab-t/witness jWbPPwAAAAB...             a peer's cosignature

(c2sp.org/tlog-checkpoint, signed-note and tlog-cosignature, with Ed25519.) What the
formats leave open is closed here: ASCII names, three lines of text, one spelling of
each. A note is read only if writing it gives the same characters again, so that there
is no bit in it that could be turned unnoticed.

The time in a cosignature is the witness's clock. It is for a reader; nothing compares
it with anything, since order in a log is order of entries and clocks can be wrong.
"""

import base64
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import printable, strict_json
from nebula_jax.security import audit, names
from nebula_jax.security.audit import AuditError, merkle

LOG = 0x01
"""The type of a log's own signature: Ed25519 over the text."""
WITNESS = 0x04
"""The type of a cosignature: Ed25519 over the time and the text."""
MOST_CHARACTERS = 16_384
"""A longer note is junk: a signature takes some 150 characters, a lab has few peers."""
LATEST = 2**63 - 1  # seconds; the largest that the format has
_ID = 4  # bytes of a key's identifier
_NAME = r"[!-*,-~]{1,200}"  # printable ASCII without space and "+"
_BODY_RE = re.compile(rf"({_NAME})\n(0|[1-9][0-9]{{0,18}})\n([A-Za-z0-9+/=]{{44}})")
_LINE_RE = re.compile(rf"— ({_NAME}) ([A-Za-z0-9+/=]{{8,400}})")
_VERIFIER_RE = re.compile(rf"({_NAME})\+([0-9a-f]{{8}})\+([A-Za-z0-9+/=]{{44}})")


class NoteError(AuditError):
    """An error in the text of a checkpoint, a signature or a public key."""


class Verifier(NamedTuple):
    """A public key with the name of whom it belongs to, and for what it serves."""

    name: str
    type: int
    """LOG or WITNESS."""
    key: bytes
    """32 bytes of Ed25519."""

    @property
    def id(self) -> bytes:
        """The four bytes that name it in a signature line."""
        seed = self.name.encode() + b"\n" + bytes([self.type]) + self.key
        return hashlib.sha256(seed).digest()[:_ID]

    @property
    def text(self) -> str:
        """The one line that is published: `name+identifier+base64`."""
        key = base64.b64encode(bytes([self.type]) + self.key).decode()
        return f"{self.name}+{self.id.hex()}+{key}"


class Checkpoint(NamedTuple):
    """A size that a log had, with its root."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        """The three lines that are signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


class Signature(NamedTuple):
    """A line below a checkpoint."""

    name: str
    id: bytes
    signature: bytes
    """A witness's begins with 8 bytes of time."""

    @property
    def line(self) -> str:
        """The line, without its end."""
        return f"— {self.name} {base64.b64encode(self.id + self.signature).decode()}"


class Note(NamedTuple):
    """A checkpoint with the signatures below it."""

    checkpoint: Checkpoint
    signatures: tuple[Signature, ...]

    @property
    def text(self) -> str:
        """The whole text."""
        lines = "".join(f"{each.line}\n" for each in self.signatures)
        return f"{self.checkpoint.text}\n{lines}"


def origin(lab: str) -> str:
    """Returns the name of a lab's log.

    Raises:
      NoteError: if no lab can have this name.
    """
    if not names.is_cluster(lab) or names.label(lab) != lab:
        raise NoteError(f"{printable.line(lab)} is no lab's name, as lab-s is one")
    return f"nebula/{lab}"


def witness_name(lab: str) -> str:
    """Returns the name under which a lab cosigns the logs of its peers.

    Raises:
      NoteError: if no lab can have this name.
    """
    return f"{origin(lab)}/witness"


def verifier(name: str, kind: int, key: ed25519.Ed25519PrivateKey) -> Verifier:
    """Returns the public half of a key.

    Args:
      name: of whose key it is.
      kind: LOG or WITNESS.
    """
    return Verifier(name, kind, key.public_key().public_bytes_raw())


def read_verifier(text: str) -> Verifier:
    """Reads the one line of a public key.

    Raises:
      NoteError: if it is none, or of another type than LOG and WITNESS.
    """
    found = _VERIFIER_RE.fullmatch(text)
    data = _decoded(found[3]) if found else b""
    read = Verifier(found[1], data[0], data[1:]) if found and data else None
    if read is None or read.text != text or read.type not in (LOG, WITNESS):
        raise NoteError(f"{printable.line(text)} is no Ed25519 key of a log or witness")
    return read


def verifier_of(folder: pathlib.Path) -> Verifier:
    """Reads the public key in the folder of a log.

    Raises:
      AuditError: if it cannot be read, or is none.
    """
    path = audit.paths(folder).verifier
    with audit.disk_errors(path):
        data = path.read_bytes()
    try:
        return read_verifier(data.decode().removesuffix("\n"))
    except (UnicodeDecodeError, NoteError):
        raise NoteError(f"{path}: is no public key of a log") from None


def read(text: str) -> Note:
    """Reads a checkpoint with its signatures, which are not verified.

    Raises:
      NoteError: if it is not written as `Note.text` writes it.
    """
    body, blank, rest = text[: MOST_CHARACTERS + 1].partition("\n\n")
    found = _BODY_RE.fullmatch(body)
    if len(text) > MOST_CHARACTERS or not blank or not rest or not found:
        raise NoteError(
            "this is no signed checkpoint: three lines, a blank, signatures"
        )
    *lines, end = rest.split("\n")
    signatures = tuple(read_line(line) for line in lines)
    note = Note(Checkpoint(found[1], int(found[2]), _decoded(found[3])), signatures)
    if end or note.text != text or len(note.checkpoint.root) != merkle.SIZE:
        raise NoteError("the text of a checkpoint is not written in the one way it has")
    return note


def read_line(line: str) -> Signature:
    """Reads the line of a signature, without its end; it is not verified.

    Raises:
      NoteError: if it is none.
    """
    found = _LINE_RE.fullmatch(line)
    data = _decoded(found[2]) if found else b""
    if not found or len(data) <= _ID:
        raise NoteError(f"{printable.line(line)} is no line of a signature")
    return Signature(found[1], data[:_ID], data[_ID:])


def cosigned_in(path: pathlib.Path) -> dict[str, str]:
    """Reads which checkpoint of a log each peer has cosigned last: peer -> note.

    Raises:
      NoteError: if the file is not as `cosigned_text` writes it.
    """
    try:
        return read_cosigned(path.read_bytes())
    except FileNotFoundError:
        return {}
    except NoteError:
        raise NoteError(f"{path}: is damaged; a copy of it serves, or none") from None


def read_cosigned(data: bytes) -> dict[str, str]:
    """Reads what `cosigned_text` has written; raises NoteError at anything else."""
    try:
        kept: dict[str, str] = strict_json.loads(data)
        if isinstance(kept, dict) and cosigned_text(kept).encode() == data:
            for text in kept.values():
                read(text)
            return kept
    except (ValueError, TypeError):
        pass
    raise NoteError("these are no cosigned checkpoints")


def cosigned_text(kept: Mapping[str, str]) -> str:
    """Returns the text that `read_cosigned` reads."""
    return json.dumps(dict(kept), indent=1, sort_keys=True) + "\n"


def sign(checkpoint: Checkpoint, key: ed25519.Ed25519PrivateKey) -> Note:
    """Signs a checkpoint with the key of its log, which is named as the origin is."""
    who = verifier(checkpoint.origin, LOG, key)
    signature = Signature(who.name, who.id, key.sign(checkpoint.text.encode()))
    return Note(checkpoint, (signature,))


def cosign(
    checkpoint: Checkpoint, name: str, key: ed25519.Ed25519PrivateKey, seconds: int
) -> Signature:
    """Signs a checkpoint of another's log as a witness.

    Args:
      checkpoint: that continues all that this witness has seen.
      seconds: since 1970, by the witness's clock.
    """
    seconds = min(max(seconds, 0), LATEST)
    signed = key.sign(_cosigned(checkpoint, seconds))
    time = seconds.to_bytes(8, "big")
    return Signature(name, verifier(name, WITNESS, key).id, time + signed)


def cosigned_at(signature: Signature) -> int:
    """Returns the time of a cosignature, in seconds since 1970."""
    return int.from_bytes(signature.signature[:8], "big")


def is_signed(note: Note, who: Verifier) -> bool:
    """Returns True if a note has a signature of a key, and none of it that is wrong."""
    lines = [
        each for each in note.signatures if each.name == who.name and each.id == who.id
    ]
    return bool(lines) and all(_is_valid(note.checkpoint, each, who) for each in lines)


def is_own(note: Note, who: Verifier) -> bool:
    """Returns True if a note is of the log whose key this is, and signed with it."""
    return note.checkpoint.origin == who.name and is_signed(note, who)


def _is_valid(checkpoint: Checkpoint, signature: Signature, who: Verifier) -> bool:
    data, message = signature.signature, checkpoint.text.encode()
    if who.type == WITNESS:
        if len(data) < 8 or cosigned_at(signature) > LATEST:
            return False
        message = _cosigned(checkpoint, cosigned_at(signature))
        data = data[8:]
    return _verified(who.key, data, message)


@functools.lru_cache(4096)  # a folder is verified often, and a signature takes 0.26 ms
def _verified(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (exceptions.InvalidSignature, ValueError):
        return False
    return True


def _cosigned(checkpoint: Checkpoint, seconds: int) -> bytes:
    """Returns what a witness signs (c2sp.org/tlog-cosignature, "cosignature/v1")."""
    return f"cosignature/v1\ntime {seconds}\n{checkpoint.text}".encode()


def _decoded(text: str) -> bytes:
    """Returns the bytes of a base64 text; b"" if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
