"""Signed heads of an audit log, and the cosignatures of its witnesses.

A log is a chain. Its root fixes all lines and their order:

    root of no line       32 zero bytes
    root of n + 1 lines   SHA-256(root of the first n || SHA-256(line n))

A head is a root with the number of its entries, signed by the log's own key; a peer
that has seen it cosigns it, by the key of its own log:

    lab-s 60 0ac94c...2a 9f1be2...0c       lab, entries, root, its signature
    lab-t 77aa3154...e4 b2c490...11        peer, its public key, its signature

Signatures are Ed25519's. Each text has one spelling: there is no bit in it that could
be turned unnoticed. Whoever has seen a head proves another by the hashes of the lines
between, which tell nothing of what is in these, for each has a salt.
"""

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import printable
from nebula_jax.security import audit
from nebula_jax.security.audit import AuditError

EMPTY = bytes(32)  # the root of a log without a line
_LAB, _HASH, _SIGNATURE = "([a-z0-9-]{1,63})", "([0-9a-f]{64})", "([0-9a-f]{128})"
_HEAD = re.compile(f"{_LAB} (0|[1-9][0-9]{{0,15}}) {_HASH} {_SIGNATURE}")
_COSIGNATURE = re.compile(f"{_LAB} {_HASH} {_SIGNATURE}")
_VERIFIER = re.compile(f"{_LAB} {_HASH}")


class HeadError(AuditError):
    """An error in the text of a head, a cosignature or a public key."""


class Verifier(NamedTuple):
    """The public key of a log."""

    lab: str
    key: str  # 32 bytes of Ed25519, in hexadecimal

    @property
    def text(self) -> str:
        """The one line that is published."""
        return " ".join(self)


class SignedHead(NamedTuple):
    """A size that a log had, with its root, as its key has signed it."""

    lab: str
    size: int
    root: str  # 32 bytes, in hexadecimal
    signature: str = ""

    @property
    def signed(self) -> str:
        """The text that is signed."""
        return f"nebula log 1 {self.lab} {self.size} {self.root}"

    @property
    def text(self) -> str:
        """The line, without its end."""
        return f"{self.lab} {self.size} {self.root} {self.signature}"


class Cosignature(NamedTuple):
    """A peer's signature of a head that it has seen and keeps."""

    lab: str
    key: str
    signature: str

    @property
    def text(self) -> str:
        """The line, without its end."""
        return " ".join(self)


Cosigned = Mapping[str, tuple[SignedHead, Cosignature]]
"""Peer -> the newest head that it has cosigned."""


def leaf(line: bytes) -> bytes:
    """Returns the hash of a line of the log."""
    return hashlib.sha256(line).digest()


def chained(root: bytes, leaves: Iterable[bytes]) -> bytes:
    """Returns the root after more lines, given their hashes."""
    for each in leaves:
        root = hashlib.sha256(root + each).digest()
    return root


def continues(old: SignedHead, new: SignedHead, leaves: Sequence[bytes]) -> bool:
    """Returns True if a head is that of the same log, grown.

    `leaves` are the hashes of the lines between: anything, from anybody. Every log
    continues one without entries, for which there are none.
    """
    if old.size == 0:
        return not leaves and old.root == EMPTY.hex()
    if len(leaves) != new.size - old.size or any(len(each) != 32 for each in leaves):
        return False
    return chained(bytes.fromhex(old.root), leaves).hex() == new.root


def read(text: str) -> SignedHead:
    """Reads a head, whose signature is not verified; raises HeadError if it is none."""
    lab, size, root, signature = _words(_HEAD, text, "signed head of a log")
    return SignedHead(lab, int(size), root, signature)


def read_cosignature(text: str) -> Cosignature:
    """Reads a cosignature, which is not verified; raises HeadError if it is none."""
    return Cosignature(*_words(_COSIGNATURE, text, "cosignature"))


def read_verifier(text: str) -> Verifier:
    """Reads the public key of a log; raises HeadError if it is none."""
    return Verifier(*_words(_VERIFIER, text, "public key of a log"))


def verifier_of(folder: pathlib.Path) -> Verifier:
    """Reads the public key in a log's folder; raises AuditError if it cannot be."""
    path = audit.paths(folder).verifier
    with audit.disk_errors(path):
        data = path.read_bytes()
    try:
        return read_verifier(data.decode("ascii", "replace").removesuffix("\n"))
    except HeadError as error:
        raise HeadError(f"{path}: {error}") from None


def cosigned_in(folder: pathlib.Path) -> Cosigned:
    """Reads the heads that peers have cosigned; raises AuditError if damaged."""
    path = audit.paths(folder).cosigned
    try:
        return read_cosigned(path.read_bytes())
    except FileNotFoundError:
        return {}
    except HeadError:
        raise HeadError(f"{path}: is damaged; a copy of it serves, or none") from None


def read_cosigned(data: bytes) -> Cosigned:
    """Reads what `cosigned_text` has written; raises HeadError at anything else."""
    found = {}
    for line in data.decode("ascii", "replace").splitlines():
        head, cosignature = line.split(" ")[:4], line.split(" ")[4:]
        made = read(" ".join(head)), read_cosignature(" ".join(cosignature))
        found[made[1].lab] = made
    if cosigned_text(found).encode() != data:
        raise HeadError("these are no cosigned heads")
    return found


def cosigned_text(kept: Cosigned) -> str:
    """Returns a line for each peer, in the order of their names."""
    lines = (" ".join(each.text for each in kept[peer]) for peer in sorted(kept))
    return "".join(f"{line}\n" for line in lines)


def public(key: ed25519.Ed25519PrivateKey) -> str:
    """Returns the public half of a key, in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def sign(
    lab: str, size: int, root: bytes, key: ed25519.Ed25519PrivateKey
) -> SignedHead:
    """Signs a head with the key of the lab's log."""
    made = SignedHead(lab, size, root.hex())
    return made._replace(signature=key.sign(made.signed.encode()).hex())


def cosign(head: SignedHead, lab: str, key: ed25519.Ed25519PrivateKey) -> Cosignature:
    """Signs the head of another's log, which continues all that was seen of it.

    Args:
      lab: that has seen it, and has this key.
    """
    signature = key.sign(_cosigned(head, lab).encode()).hex()
    return Cosignature(lab, public(key), signature)


def is_signed(head: SignedHead, who: Verifier) -> bool:
    """Returns True if a head is of the log whose key this is, and signed with it."""
    return head.lab == who.lab and _verified(who.key, head.signature, head.signed)


def is_cosigned(head: SignedHead, by: Cosignature) -> bool:
    """Returns True if a cosignature is of a head, by the key that it has with it."""
    return _verified(by.key, by.signature, _cosigned(head, by.lab))


def _cosigned(head: SignedHead, lab: str) -> str:
    return f"nebula witness 1 {lab} of {head.signed}"


@functools.lru_cache(4096)  # a folder is verified often, and a signature takes 0.26 ms
def _verified(key: str, signature: str, message: str) -> bool:
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), message.encode())
    except (exceptions.InvalidSignature, ValueError):
        return False
    return True


def _words(pattern: re.Pattern[str], text: str, what: str) -> tuple[str, ...]:
    found = pattern.fullmatch(text)
    if found is None:
        raise HeadError(f"{printable.line(text)} is no {what}")
    return found.groups()
