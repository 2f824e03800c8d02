"""The witness that a lab is to its peers' audit logs.

A peer sends each checkpoint that it signs, with the proof that it continues the one
before. The witness keeps the newest one and cosigns it. It refuses one that is smaller,
one that is not a continuation, one of another key: a peer that wants to change or drop
an entry that was witnessed is found out, for it must show another log here.

What a witness has forgotten, it cannot refuse. So the key with which it cosigns a
peer's log lies in one file with what it has seen of that log: who loses the one has
lost the other, and the peer sees the new key and records it. An older copy of the file
brings both back; then the peer sees that the witness would continue from a smaller size
than it has cosigned (`Log.cosigned`).

The first key that a peer shows is kept, and no other is taken; the peer itself is
authenticated by its certificate. If a peer has begun a new log, somebody moves its file
away here: a decision of a person, which the peer sees by the new key.
"""

import base64
import json
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import printable
from nebula_jax.security import audit, private_files, store
from nebula_jax.security.audit import AuditError, checkpoint_note, merkle


class Cosignature(NamedTuple):
    """A witness's answer."""

    line: str
    """The line to add below the checkpoint."""
    verifier: str
    """The public key of the witness for this peer's log."""


class Seen(NamedTuple):
    """The newest checkpoint of a peer's log that this lab has cosigned."""

    note: checkpoint_note.Note
    """The checkpoint, as the peer signed it."""
    verifier: checkpoint_note.Verifier
    """The public key of the peer's log."""
    key: ed25519.Ed25519PrivateKey
    """The key with which this lab cosigns that log."""


class Witness:
    """The witness of one lab, for the logs of all its peers: its switch."""

    def __init__(self, folder: pathlib.Path, lab: str):
        """Makes one, with what it has seen before.

        Args:
          folder: `audit` of the witness's own lab.

        Raises:
          AuditError: if the folder cannot be used, or no lab can have this name.
        """
        self._folder = audit.paths(folder).peers
        self._name = checkpoint_note.witness_name(lab)
        with audit.disk_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def seen(self, peer: str) -> Seen | None:
        """Returns what was seen of a peer's log; None if nothing was.

        Raises:
          store.StoreError: if the file is damaged. Without it, the log can be witnessed
            only anew, with a new key: somebody moves it away for that.
          private_files.PrivateFileError: if others can read it.
        """
        kept = self._store(peer)
        value = kept.read()["seen"] if kept.path.exists() else {}
        if not value:
            return None
        key = base64.b64decode(value["key"])
        return Seen(
            checkpoint_note.read(value["note"]),
            checkpoint_note.read_verifier(value["verifier"]),
            ed25519.Ed25519PrivateKey.from_private_bytes(key),
        )

    def size(self, peer: str) -> int:
        """Returns the size from which a peer has to prove the next checkpoint.

        For errors see `seen`.
        """
        seen = self.seen(peer)
        return seen.note.checkpoint.size if seen else 0

    def cosign(
        self,
        peer: str,
        text: str,
        proof: Sequence[bytes],
        verifier: str,
        seconds: int | None = None,
    ) -> Cosignature:
        """Cosigns a peer's checkpoint, once it is kept on the disk.

        Args:
          text: of the checkpoint; any text.
          proof: `Log.consistency` from `size(peer)` on; any bytes.
          verifier: the public key of the peer's log; any text.
          seconds: the time for a reader, since 1970; None for the machine's clock.

        Raises:
          AuditError: if it is refused, or what was seen cannot be read or written.
          private_files.PrivateFileError: likewise.
        """
        note, who = _received(peer, text, verifier)
        with audit.disk_errors(self._folder):
            seen = self.seen(peer)
            if seen is not None:
                self._check(peer, seen, who, note, proof)
                key = seen.key
            elif proof:
                raise AuditError(f"{peer} proves from a size that was not seen here")
            else:
                key = ed25519.Ed25519PrivateKey.generate()
            value = {
                "key": base64.b64encode(key.private_bytes_raw()).decode(),
                "note": note.text,
                "verifier": who.text,
            }
            kept = self._store(peer)
            kept.create()
            with kept.changing() as tables:
                tables["seen"] = value
        seconds = int(time.time()) if seconds is None else seconds
        line = checkpoint_note.cosign(note.checkpoint, self._name, key, seconds).line
        own = checkpoint_note.verifier(self._name, checkpoint_note.WITNESS, key)
        return Cosignature(line, own.text)

    def _check(
        self,
        peer: str,
        seen: Seen,
        who: checkpoint_note.Verifier,
        note: checkpoint_note.Note,
        proof: Sequence[bytes],
    ) -> None:
        """Raises if a signed checkpoint does not continue what was seen."""
        if who != seen.verifier:
            raise AuditError(
                f"{peer} shows another key of its audit log than before: it lost its"
                " log or hides it; if it has begun a new one for a good reason, move"
                f" {self._store(peer).path} away"
            )
        old, new = seen.note.checkpoint, note.checkpoint
        if (new.size, new.root) == (old.size, old.root):
            return  # sent again, with the proof that led to it
        if new.size < old.size:
            text = f"{peer}'s audit log has {new.size} entries after {old.size}"
        elif new.size == old.size:
            text = f"{peer} has signed two audit logs of {new.size} entries"
        elif not merkle.is_consistent(old.size, old.root, new.size, new.root, proof):
            text = (
                f"{peer}'s audit log of {new.size} entries does not continue that of"
                f" {old.size}, or the proof is wrong"
            )
        else:
            return
        # Evidence that the peer has signed against itself; the first is enough.
        kept = self._folder / f"{peer}.refused.json"
        if not kept.exists():
            value = {"seen": seen.note.text, "refused": note.text}
            private_files.write(kept, json.dumps(value, indent=1))
        raise AuditError(f"{text}; both checkpoints are in {kept}")

    def _store(self, peer: str) -> store.Store:
        checkpoint_note.origin(peer)  # no other name leads to a file
        return store.Store(self._folder / f"{peer}.json", ("seen",))


def _received(
    peer: str, text: str, verifier: str
) -> tuple[checkpoint_note.Note, checkpoint_note.Verifier]:
    """Returns a checkpoint as its log signed it, and the key; see `Witness.cosign`."""
    try:
        note = checkpoint_note.read(text)
        who = checkpoint_note.read_verifier(verifier)
        origin = checkpoint_note.origin(peer)
    except checkpoint_note.NoteError as error:
        raise AuditError(f"{printable.line(peer)}: {error}") from None
    expected = origin, origin, checkpoint_note.LOG
    if (note.checkpoint.origin, who.name, who.type) != expected:
        raise AuditError(f"{peer} sent the log of another: {note.checkpoint.origin}")
    # Others' signatures could be anything, and would be kept.
    own = [each for each in note.signatures if each.name == origin]
    note = note._replace(signatures=tuple(own[:1]))
    if not checkpoint_note.is_signed(note, who):
        raise AuditError(f"{peer}'s checkpoint is not signed by it")
    return note, who
