"""The audit log of a site, open for more entries.

    with audit_log.Log(folder, "lab-s") as log:
        log.append("job", "ana", event="began", job="m3", commit="d484d8e")
        log.commit()                                # on the disk from here on
        text = log.sign_head()                      # for the peers, who cosign it

Entries are leaves of a Merkle tree (`merkle.py`). A signed checkpoint states the size
and the root of the tree, and so fixes every entry so far. Peers that cosign it keep it
(`witness.py`): even the lab itself, which has the key, can then not rewrite its log.
What no checkpoint covers yet is not protected, which is a reason to sign often.

One process at a time has the log open: the switch, or without one a command, which
otherwise has the switch append for it. A crash may leave a part of a line: what follows
the last whole entry is cut off, kept and recorded. What a signed checkpoint covers was
synced before. If that is not whole, somebody or a bad disk changed it, and nothing is
mended or appended.
"""

import contextlib
import datetime
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import disk, files
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import AuditError, checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.tls import certificates

_ADVICE = "`nebula audit verify` names what was changed"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Log:
    """A site's audit log. Threads may share it.

    After an error of the disk it takes no more entries until it is opened again:
    whoever must not go on unrecorded stops there.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        lab: str,
        clock: Callable[[], datetime.datetime] = _utc_now,
    ):
        """Opens the log of a lab, or begins it.

        All entries are compared with the newest checkpoint.

        Args:
          folder: `audit` in the folder of a federation.
          clock: for the times in the entries, which inform and decide nothing.

        Raises:
          AuditError: if it cannot be read or written, or entries that a checkpoint
            covers have changed, or no lab can have this name.
          private_files.PrivateFileError: if others can read its key.
        """
        self._folder, self.lab, self._clock = folder, lab, clock
        self._paths = paths = audit.paths(folder)
        self._mutex = threading.Lock()  # held while an entry is appended
        self._syncing = threading.RLock()  # held while the disk writes: first of both
        self.is_dirty = False
        """True if there are entries that a power cut would take."""
        self._refusal = ""  # why nothing is appended any more
        self._tree = merkle.Tree()
        self._end = 0  # bytes of the entries that are in the tree
        self._witnesses: dict[str, str] = {}  # peer -> key with which it cosigns now
        with audit.disk_errors(folder), contextlib.ExitStack() as stack:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.callback(os.close, _locked(paths))
            self._key = _load_key(paths, lab)
            self._verifier = _verifier(lab, self._key)
            self._file = os.open(paths.log, _FLAGS | os.O_APPEND, 0o600)
            stack.callback(os.close, self._file)
            disk.sync(folder)
            self._cosigned = checkpoint_note.cosigned_in(paths.cosigned)
            newest = self._read_checkpoint()
            cut = self._read(newest)
            self._newest = newest or self._sign(self._tree.size, self._tree.root(), b"")
            self._cut_leaves()
            if cut:
                self._note(self._mend(cut))
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Closes the files, without `commit`."""
        with self._syncing, self._mutex:
            self._refusal = f"{self._folder}: this audit log is closed"
            self._opened.close()

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
          kind: as in `job` or `account.add`.
          what: JSON values by name; `event` is a verb in the past tense.

        Returns:
          Its index.

        Raises:
          AuditError: if it is no entry, or there may be a secret in it, or it cannot be
            written; then it is not there.
        """
        line = audit_entries.encode(kind, self._clock(), who, what)
        with self._mutex, audit.disk_errors(self._folder):
            self._check_usable()
            return self._write(line)

    def commit(self) -> None:
        """Returns when all entries so far would outlive a power cut.

        Raises:
          AuditError: if the disk fails; nothing more can be appended.
        """
        with self._syncing, audit.disk_errors(self._folder):
            with self._mutex:
                self._check_usable()
                is_dirty, self.is_dirty = self.is_dirty, False
            if is_dirty:  # without the mutex: others append meanwhile
                self._sync()

    @property
    def verifier(self) -> str:
        """The public key of this log, as peers are given it."""
        return self._verifier.text

    def receipt(self, facts: bytes) -> bytes:
        """Signs what an entry is about, once all entries so far are on the disk.

        Args:
          facts: of a certificate, see `tls.certificates.facts`; no checkpoint.

        Raises:
          AuditError: if the disk fails.
        """
        self.commit()
        return self._key.sign(facts)

    def sign_head(self) -> str:
        """Signs what there is, once it is on the disk; returns the checkpoint.

        Raises:
          AuditError: if it cannot be written.
        """
        with self._syncing, audit.disk_errors(self._folder):
            with self._mutex:
                self._check_usable()
                size, root = self._tree.size, self._tree.root()
                hashes = self._tree.leaves(self._newest.checkpoint.size)
            if hashes:
                self._sync()
                self._newest = self._sign(size, root, hashes)
            return self._newest.text

    def consistency(self, old: int, size: int) -> list[bytes]:
        """Proves that the log of `size` entries continues that of `old` entries.

        Raises:
          AuditError: if it has not had these sizes.
        """
        with self._mutex:
            try:
                return self._tree.consistency(old, size)
            except ValueError as error:
                raise AuditError(f"the audit log has no such proof: {error}") from None

    def cosigned(self, peer: str) -> int:
        """Returns the size of the newest checkpoint that a peer has cosigned, or 0.

        A peer that would continue from a smaller one has lost some of what it
        witnessed, perhaps by a restored backup.
        """
        text = self._cosigned.get(peer)
        return checkpoint_note.read(text).checkpoint.size if text else 0

    def add_cosignature(self, peer: str, text: str, line: str, verifier: str) -> bool:
        """Keeps a peer's cosignature of a checkpoint of this log.

        If the peer's key is another one than so far, that becomes an entry: its earlier
        witness state is lost.

        Args:
          text: the checkpoint that was sent to it.
          line: its cosignature, from `witness.Witness.cosign`.
          verifier: its public key for this log, from there too.

        Returns:
          True if it is kept; False if the peer has cosigned as many entries with
          another key, or more.

        Raises:
          AuditError: if it does not hold, or cannot be read or written.
        """
        note, signature = checkpoint_note.read(text), checkpoint_note.read_line(line)
        who = checkpoint_note.read_verifier(verifier)
        name = checkpoint_note.witness_name(peer)
        if (who.name, who.type) != (name, checkpoint_note.WITNESS):
            raise AuditError(f"{peer} sent the public key of another: {who.name}")
        only = note._replace(signatures=(signature,))
        if not checkpoint_note.is_signed(only, who):
            raise AuditError(f"{peer} sent a cosignature that does not hold")
        if not checkpoint_note.is_own(note, self._verifier):
            raise AuditError(f"{peer} cosigned a checkpoint that is not of this log")
        with self._syncing, audit.disk_errors(self._folder):
            self._check_usable()
            kept = self._cosigned
            if peer in kept and note.checkpoint.size <= self.cosigned(peer):
                before = checkpoint_note.read(kept[peer])
                is_same = before.checkpoint == note.checkpoint
                return is_same and checkpoint_note.is_signed(before, who)
            former = self._witnesses.get(peer)
            if former != verifier:
                what = {
                    "event": audit_entries.WITNESSED,
                    "lab": peer,
                    "verifier": verifier,
                }
                self._note(what | ({"former": former} if former else {}))
            own = [each for each in note.signatures if each.name == self._verifier.name]
            text = note._replace(signatures=(*own[:1], signature)).text
            self._cosigned = {**kept, peer: text}
            written = checkpoint_note.cosigned_text(self._cosigned)
            private_files.write(self._paths.cosigned, written)
            return True

    def _check_usable(self) -> None:
        if self._refusal:
            raise AuditError(self._refusal)

    # Opening.

    def _read(self, newest: checkpoint_note.Note | None) -> bytes:
        """Takes the entries into the tree; returns what follows the last whole one."""
        covered = newest.checkpoint.size if newest else 0
        with self._paths.log.open("rb") as stream:
            longest = audit_entries.MOST_BYTES + 1
            while (line := stream.readline(longest)).endswith(b"\n"):
                if newest is None:
                    raise AuditError(
                        f"{self._folder}: there are entries but no signed checkpoint:"
                        " bring the file `checkpoint` back from a copy"
                    )
                if self._tree.size >= covered and not audit_entries.is_entry(line[:-1]):
                    break  # nothing that was synced follows
                self._take(line[:-1])
            stream.seek(self._end)
            cut = stream.read()
        if self._tree.size < covered:
            raise AuditError(
                f"{self._paths.log}: entry {self._tree.size} (line"
                f" {self._tree.size + 1}) is missing, and a signed checkpoint covers"
                f" {covered}; {_ADVICE}"
            )
        if newest and self._tree.root(covered) != newest.checkpoint.root:
            raise AuditError(
                f"{self._paths.log}: its first {covered} entries are not those that a"
                f" checkpoint was signed for; {_ADVICE}"
            )
        return cut

    def _read_checkpoint(self) -> checkpoint_note.Note | None:
        path = self._paths.checkpoint
        try:
            note = checkpoint_note.read(path.read_bytes().decode())
        except FileNotFoundError:
            return None
        except (UnicodeDecodeError, checkpoint_note.NoteError) as error:
            raise AuditError(f"{path}: {error}; {_ADVICE}") from None
        if not checkpoint_note.is_own(note, self._verifier):
            raise AuditError(
                f"{path}: is not signed with the key of this log; {_ADVICE}"
            )
        return note

    def _mend(self, cut: bytes) -> dict[str, Any]:
        """Cuts off what is not whole, after keeping it; returns what is recorded."""
        digest, size = hashlib.sha256(cut).hexdigest(), self._tree.size
        kept = self._folder / f"cut.{size}.{digest[:12]}"
        with files.writing(kept) as partial:
            partial.write_bytes(cut)
        os.ftruncate(self._file, self._end)
        self._sync()
        about = {"entry": size, "bytes": len(cut), "sha256": digest, "kept": kept.name}
        return {"event": audit_entries.CUT_OFF, **about}

    def _cut_leaves(self) -> None:
        """Cuts off hashes that a crash left beyond the newest checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            end = merkle.SIZE * self._newest.checkpoint.size
            if self._paths.leaves.stat().st_size > end:
                os.truncate(self._paths.leaves, end)

    # Writing.

    def _write(self, line: bytes) -> int:
        """Appends a line, or nothing of it, and returns its index."""
        index, data = self._tree.size, line + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError), self._or_refuse():
                os.ftruncate(self._file, self._end)
            raise
        self._take(line)
        self.is_dirty = True
        return index

    def _take(self, line: bytes) -> None:
        """Takes an entry that is in the file into the tree."""
        self._tree.append(merkle.leaf(line))
        self._end += len(line) + 1
        if found := audit_entries.witness_of(line):
            peer, verifier = found
            self._witnesses[peer] = verifier

    def _note(self, what: dict[str, Any]) -> None:
        """Appends an entry about the log itself, on the disk at once."""
        with self._mutex:
            self._write(audit_entries.encode("audit", self._clock(), self.lab, what))
        self._sync()

    def _sign(self, size: int, root: bytes, hashes: bytes) -> checkpoint_note.Note:
        """Signs entries that are on the disk, once the hashes of the new ones are."""
        leaves = os.open(self._paths.leaves, _FLAGS, 0o600)
        try:
            while hashes:
                begin = merkle.SIZE * size - len(hashes)
                hashes = hashes[os.pwrite(leaves, hashes, begin) :]
            os.fdatasync(leaves)
        finally:
            os.close(leaves)
        checkpoint = checkpoint_note.Checkpoint(self._verifier.name, size, root)
        note = checkpoint_note.sign(checkpoint, self._key)
        private_files.write(self._paths.checkpoint, note.text)
        return note

    def _sync(self) -> None:
        with self._or_refuse():
            os.fdatasync(self._file)

    @contextlib.contextmanager
    def _or_refuse(self) -> Iterator[None]:
        """Appends nothing after an error: another sync would not show what is lost."""
        try:
            yield
        except OSError as error:
            self._refusal = (
                f"{self._folder}: the disk failed ({error.strerror}), so the audit log"
                " takes no more entries: mend it and start again"
            )
            raise


def _locked(paths: audit.Paths) -> int:
    try:
        return private_files.lock(paths.lock)
    except private_files.LockedError:
        raise AuditError(
            f"{paths.lock.parent}: another process has this audit log open: a switch of"
            " this lab that runs already, or a command that is stopped"
        ) from None


def _verifier(lab: str, key: ed25519.Ed25519PrivateKey) -> checkpoint_note.Verifier:
    name = checkpoint_note.origin(lab)
    return checkpoint_note.verifier(name, checkpoint_note.LOG, key)


def _load_key(paths: audit.Paths, lab: str) -> ed25519.Ed25519PrivateKey:
    """Returns the key of a log, which is never replaced; makes it for a new log."""
    if not paths.key.exists():
        if paths.log.exists() and paths.log.stat().st_size:
            raise AuditError(
                f"{paths.key}: is missing: this log can be read and verified, but not"
                f" continued; move {paths.key.parent} away to begin another"
            )
        made = certificates.pem(ed25519.Ed25519PrivateKey.generate())
        private_files.write(paths.key, made.decode())
    try:
        text = private_files.read(paths.key).encode()
        key = serialization.load_pem_private_key(text, None)
    except (TypeError, ValueError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise AuditError(
            f"{paths.key}: is no private key of Ed25519 without a password"
        )
    expected = f"{_verifier(lab, key).text}\n"
    if not paths.verifier.exists():
        private_files.write(paths.verifier, expected)
    elif paths.verifier.read_bytes() != expected.encode():
        raise AuditError(
            f"{paths.verifier}: is the public key of another log than that of"
            f" {checkpoint_note.origin(lab)} with {paths.key.name}"
        )
    return key
