"""The audit log of a lab: who did what, which nobody can change unnoticed.

    with audit.Log.open(folder, "lab-s") as log:
        log.append("job", "ana", event="began", job="m3", commit="d484d8e")
        log.commit()                                # on the disk from here on
        text = log.sign_head()                      # for the peers, who cosign it

Entries are leaves of a Merkle tree (`merkle.py`). A signed checkpoint states the size
and the root of the tree, and so fixes every entry so far. Peers that cosign it keep it
(`witness.py`): even the lab itself, which has the key, can then not rewrite its log.
What no checkpoint covers yet is not protected, which is a reason to sign often.

Several processes of a lab may have its log open; each first takes in what the others
have appended. After an error of the disk a log takes no more entries until it is opened
again: whoever must not go on unrecorded stops there.
"""

import contextlib
import datetime
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import key as audit_key
from nebula_jax.security.audit import store as audit_store
from nebula_jax.security.audit.files import AuditError


class Head(NamedTuple):
    """The state of a log: all its entries are fixed by these two."""

    size: int
    """Entries."""
    root: bytes


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Log:
    """A lab's audit log, open for more entries. Threads may share it."""

    def __init__(
        self, folder: pathlib.Path, lab: str, clock: Callable[[], datetime.datetime]
    ):
        """Opens it: see `open`, which is what to call."""
        self._folder, self._lab, self._clock = folder, lab, clock
        paths = audit_files.paths(folder)
        self._mutex = threading.RLock()  # held for all that follows
        self._syncing = threading.Lock()  # held while the disk writes
        self._is_dirty = self._is_closed = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = audit_files.Lock(paths.lock)
        try:
            with self._lock.held():
                self._key = audit_key.load(paths, lab)
                self._verifier = audit_key.verifier(lab, self._key)
                self._store = audit_store.Store(paths, self._verifier)
        except BaseException:
            self._lock.close()
            raise

    @classmethod
    def open(
        cls,
        folder: pathlib.Path,
        lab: str,
        clock: Callable[[], datetime.datetime] = _utc_now,
    ) -> "Log":
        """Opens the log of a lab, or begins it.

        What a crash left half-written at its end is cut off, kept beside it and
        recorded. All entries are compared with their hashes and the newest checkpoint.

        Args:
          folder: `audit` in the folder of a federation.
          lab: whose it is.
          clock: for the times in the entries, which inform and decide nothing.

        Raises:
          AuditError: if it cannot be read or written, or entries that a checkpoint
            covers have changed.
          checkpoint_note.NoteError: if no lab can have this name.
          private_files.PrivateFileError: if others can read its key.
        """
        with audit_files.disk_errors(folder):
            log = cls(folder, lab, clock)
            try:
                log._begin()
            except BaseException:
                log.close()
                raise
        return log

    def close(self) -> None:
        """Closes the files, without `commit`."""
        with self._mutex:
            if not self._is_closed:
                self._is_closed = True
                self._store.close()
                self._lock.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.commit()
        finally:
            self.close()

    def append(self, kind: str, who: str, /, **what: Any) -> int:
        """Appends an entry, which is on the disk for sure after `commit`.

        Args:
          kind: see `audit_phrases.PHRASES`; any other serves too.
          who: did it.
          what: JSON values by name; `event` is a verb in the past tense.

        Returns:
          Its index.

        Raises:
          audit_entries.SecretError: if there may be a secret in it.
          AuditError: if it is no entry, or cannot be written; then it is not there.
        """
        line = audit_entries.encode(kind, self._clock(), who, what)
        with self._held():
            return self._write(line)

    def commit(self) -> None:
        """Returns when all entries of this process would outlive a power cut.

        Raises:
          AuditError: if the disk fails; nothing more can be appended.
        """
        with self._syncing:  # who waits here may find that another has synced for it
            with self._mutex:
                self._check_usable()
                is_dirty, self._is_dirty = self._is_dirty, False
            if is_dirty:
                with audit_files.disk_errors(self._folder):
                    self._store.sync()

    def head(self) -> Head:
        """Returns the size and the root, with the entries of other processes.

        Raises:
          AuditError: if the log cannot be read.
        """
        with self._held() as store:
            return Head(store.tree.size, store.tree.root())

    @property
    def verifier(self) -> str:
        """The public key of this log, as peers are given it."""
        return self._verifier.text

    @property
    def checkpoint(self) -> str:
        """The newest signed checkpoint, with the peers' cosignatures."""
        with self._held():
            return self._newest().text

    def sign_head(self) -> str:
        """Signs what there is, once it is on the disk, and returns the checkpoint.

        If there is nothing new, that is the newest one again.

        Raises:
          AuditError: if it cannot be written.
        """
        with self._held() as store:
            if self._newest().checkpoint.size < store.tree.size:
                store.sync()
                self._sign()
            return self._newest().text

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Proves that an entry is among the first `size`: see `merkle.is_included`.

        Raises:
          AuditError: if there is no such entry.
        """
        with self._held() as store, _sizes():
            return store.tree.inclusion(index, size)

    def consistency(self, old: int, size: int) -> list[bytes]:
        """Proves that the log of `size` entries continues that of `old` entries.

        Raises:
          AuditError: if it has not had these sizes.
        """
        with self._held() as store, _sizes():
            return store.tree.consistency(old, size)

    def cosigned(self, peer: str) -> int:
        """Returns the size of the newest checkpoint that a peer has cosigned, or 0.

        A peer that would continue from a smaller one has lost some of what it
        witnessed, perhaps by a restored backup.
        """
        with self._held() as store:
            return store.cosigned.get(checkpoint_note.witness_name(peer), 0)

    def add_cosignature(self, peer: str, text: str, line: str, verifier: str) -> bool:
        """Keeps a peer's cosignature of a checkpoint of this log.

        If the peer's key is another one than so far, that becomes an entry: its earlier
        witness state is lost.

        Args:
          peer: the lab at the other end of an authenticated connection.
          text: the checkpoint that was sent to it.
          line: its cosignature, from `witness.Witness.cosign`.
          verifier: its public key for this log, from there too.

        Returns:
          True if it is kept; False if a newer checkpoint was signed meanwhile, or the
          peer has cosigned this one with another key.

        Raises:
          AuditError: if it does not hold, or cannot be written.
          checkpoint_note.NoteError: if one of the texts cannot be read.
        """
        note, signature = checkpoint_note.read(text), checkpoint_note.read_line(line)
        who = checkpoint_note.read_verifier(verifier)
        name = checkpoint_note.witness_name(peer)
        if (who.name, who.type) != (name, checkpoint_note.WITNESS):
            raise AuditError(f"{peer} sent the public key of another: {who.name}")
        only = note._replace(signatures=(signature,))
        if not checkpoint_note.is_signed(only, who):
            raise AuditError(f"{peer} sent a cosignature that does not hold")
        if not checkpoint_note.is_signed(note, self._verifier):
            raise AuditError(f"{peer} cosigned a checkpoint that is not of this log")
        with self._held() as store:
            newest = self._newest()
            is_newest = newest.checkpoint == note.checkpoint
            found = {each.id for each in newest.signatures if each.name == name}
            if is_newest and found - {who.id}:
                return False  # each key would make the note longer, without end
            self._meet(peer, verifier)
            if is_newest and not found:
                store.record(
                    newest._replace(signatures=(*newest.signatures, signature))
                )
            return is_newest

    def _begin(self) -> None:
        with self._held() as store:
            store.check_checkpoint()

    @contextlib.contextmanager
    def _held(self) -> Iterator[audit_store.Store]:
        """Excludes all others, with what they have appended taken in."""
        with self._mutex, audit_files.disk_errors(self._folder):
            self._check_usable()
            with self._lock.held():
                mended = self._store.follow()
                if self._store.history.newest is None:
                    self._sign_empty()
                if mended:
                    self._note(self._lab, mended)
                yield self._store

    def _check_usable(self) -> None:
        if self._is_closed:
            raise AuditError(f"{self._folder}: this audit log is closed")
        if self._store.refusal:
            raise AuditError(self._store.refusal)

    def _newest(self) -> checkpoint_note.Note:
        newest = self._store.history.newest
        assert newest is not None  # even an empty log is signed
        return newest

    def _sign_empty(self) -> None:
        """Signs a log without entries: one that has no signature has lost it."""
        if self._store.tree.size:
            raise AuditError(
                f"{self._folder}: there are entries but no signed checkpoints: bring"
                " checkpoints.jsonl back from a copy"
            )
        self._sign()

    def _write(self, line: bytes) -> int:
        index = self._store.write(line)
        self._is_dirty = True
        return index

    def _note(self, who: str, what: dict[str, Any]) -> None:
        """Appends an entry about the log itself, on the disk at once."""
        self._write(audit_entries.encode("audit", self._clock(), who, what))
        self._store.sync()

    def _meet(self, peer: str, verifier: str) -> None:
        """Records with which key a peer cosigns, if that is new."""
        former = self._store.witnesses.get(peer)
        if former != verifier:
            what = {"event": "witness", "lab": peer, "verifier": verifier}
            self._note(self._lab, what | ({"former": former} if former else {}))

    def _sign(self) -> None:
        tree = self._store.tree
        checkpoint = checkpoint_note.Checkpoint(
            self._verifier.name, tree.size, tree.root()
        )
        self._store.record(checkpoint_note.sign(checkpoint, self._key))


@contextlib.contextmanager
def _sizes() -> Iterator[None]:
    """Turns a size or an index that does not exist into an AuditError."""
    try:
        yield
    except ValueError as error:
        raise AuditError(f"the audit log has no such proof: {error}") from None
