"""The audit log of a site, open for more entries.

    with audit_log.Log(folder, "lab-s") as log:
        log.append("job", "ana", event="began", job="m3", commit="d484d8e")
        log.commit()                                # on the disk from here on
        text = log.sign_head()                      # for the peers, who cosign it

Entries are leaves of a Merkle tree (`merkle.py`). A signed checkpoint states the size
and the root of the tree, and so fixes every entry so far. Peers that cosign it keep it
(`witness.py`): even the lab itself, which has the key, can then not rewrite its log.
What no checkpoint covers yet is not protected, which is a reason to sign often.

The switch has the log open, and commands append beside it. Whoever writes holds the
folder's lock, and first takes in what others have appended. An entry is a line and its
hash, written one after the other, so a crash may leave a part of a line, or a line
without its hash: what follows the last whole entry is cut off, kept and recorded. What
a signed checkpoint covers was synced before. If that is not whole, somebody or a bad
disk changed it, and nothing is mended or appended.
"""

import contextlib
import datetime
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import disk
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import AuditError, checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries

_ADVICE = "`nebula audit verify` names what was changed"


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

        All entries are compared with their hashes and the newest checkpoint.

        Args:
          folder: `audit` in the folder of a federation.
          lab: whose it is.
          clock: for the times in the entries, which inform and decide nothing.

        Raises:
          AuditError: if it cannot be read or written, or entries that a checkpoint
            covers have changed, or no lab can have this name.
          private_files.PrivateFileError: if others can read its key.
        """
        self._folder, self._lab, self._clock = folder, lab, clock
        self._paths = paths = audit.paths(folder)
        self._mutex = threading.RLock()  # held for all that follows
        self._syncing = threading.Lock()  # held while the disk writes
        self._is_dirty = self._is_closed = False
        self._refusal = ""  # why nothing is appended any more
        self._tree = merkle.Tree()
        self._history = checkpoint_note.History()
        self._witnesses: dict[str, str] = {}  # peer -> key with which it cosigns now
        self._cosigned: dict[str, int] = {}  # name of a signer -> size that it signed
        with audit.disk_errors(folder), contextlib.ExitStack() as stack:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with audit.locked(paths.lock):
                self._key = _load_key(paths, lab)
                self._verifier = _verifier(lab, self._key)
            self._files = [
                stack.enter_context(contextlib.closing(audit.File(path)))
                for path in (paths.log, paths.leaves, paths.checkpoints)
            ]
            self._log, self._leaves, self._checkpoints = self._files
            disk.sync(folder)
            with self._held():
                self._check_newest()
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Closes the files, without `commit`."""
        with self._mutex:
            self._is_closed = True
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
          kind: one that `readable.py` has words for, or any other.
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
            if is_dirty:  # without the mutex: others append meanwhile
                with audit.disk_errors(self._folder):
                    self._sync(self._log, self._leaves)

    @property
    def verifier(self) -> str:
        """The public key of this log, as peers are given it."""
        return self._verifier.text

    def sign_head(self) -> str:
        """Signs what there is, once it is on the disk.

        Returns:
          The newest checkpoint, with the peers' cosignatures if nothing was new.

        Raises:
          AuditError: if it cannot be written.
        """
        with self._held():
            if self._newest().checkpoint.size < self._tree.size:
                self._sync(self._log, self._leaves)
                self._sign()
            return self._newest().text

    def consistency(self, old: int, size: int) -> list[bytes]:
        """Proves that the log of `size` entries continues that of `old` entries.

        Raises:
          AuditError: if it has not had these sizes.
        """
        with self._held():
            try:
                return self._tree.consistency(old, size)
            except ValueError as error:
                raise AuditError(f"the audit log has no such proof: {error}") from None

    def cosigned(self, peer: str) -> int:
        """Returns the size of the newest checkpoint that a peer has cosigned, or 0.

        A peer that would continue from a smaller one has lost some of what it
        witnessed, perhaps by a restored backup.
        """
        with self._held():
            return self._cosigned.get(checkpoint_note.witness_name(peer), 0)

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
        if not checkpoint_note.is_signed(note, self._verifier):
            raise AuditError(f"{peer} cosigned a checkpoint that is not of this log")
        with self._held():
            newest = self._newest()
            is_newest = newest.checkpoint == note.checkpoint
            found = {each.id for each in newest.signatures if each.name == name}
            if is_newest and found - {who.id}:
                return False  # each key would make the note longer, without end
            former = self._witnesses.get(peer)
            if former != verifier:
                what = {"event": "witness", "lab": peer, "verifier": verifier}
                self._note(what | ({"former": former} if former else {}))
            if is_newest and not found:
                more = (*newest.signatures, signature)
                self._record(newest._replace(signatures=more))
            return is_newest

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Excludes all others, with what they have appended taken in."""
        with self._mutex, audit.disk_errors(self._folder):
            self._check_usable()
            with audit.locked(self._paths.lock):
                mended = self._follow()
                if self._history.newest is None:
                    self._sign_empty()
                if mended:
                    self._note(mended)
                yield

    def _check_usable(self) -> None:
        if self._is_closed:
            raise AuditError(f"{self._folder}: this audit log is closed")
        if self._refusal:
            raise AuditError(self._refusal)

    # Reading what other processes have appended, or a crash has left.

    def _follow(self) -> dict[str, Any] | None:
        """Reads on to the end of the files; returns what had to be mended, if any."""
        grown = [file.size() - file.end for file in self._files]
        if not any(grown):
            return None
        try:
            if min(grown) < 0:
                raise AuditError(
                    f"{self._folder}: files of the audit log became shorter while it"
                    f" was open; {_ADVICE}"
                )
            is_torn = self._read_checkpoints()
            return self._read_entries(is_torn)
        except AuditError as error:
            self._refusal = str(error)
            raise

    def _read_checkpoints(self) -> bool:
        """Reads new checkpoints; returns True if a line without an end follows."""
        *lines, torn = self._checkpoints.rest().split(b"\n")
        for line in lines:
            self._take_checkpoint(line)
        newest = self._history.newest
        if lines and not (newest and checkpoint_note.is_own(newest, self._verifier)):
            raise AuditError(
                f"{self._paths.checkpoints}: line {self._history.lines} is not signed"
                f" with the key of this log; {_ADVICE}"
            )
        return bool(torn)

    def _take_checkpoint(self, line: bytes) -> None:
        try:
            self._history = checkpoint_note.advance(self._history, line)
        except AuditError as error:
            raise AuditError(
                f"{self._paths.checkpoints}: line {self._history.lines + 1} {error};"
                f" {_ADVICE}"
            ) from None
        self._checkpoints.end += len(line) + 1
        newest = self._newest()
        for each in newest.signatures:
            self._cosigned[each.name] = newest.checkpoint.size

    def _read_entries(self, is_torn: bool) -> dict[str, Any] | None:
        """Reads new entries; mends the files if one, or the checkpoints, are torn."""
        begin = self._tree.size
        data, hashes = self._log.rest(), self._leaves.rest()
        lines = audit_entries.whole(data, hashes, begin)
        expected = b"".join(map(merkle.leaf, lines))
        stored = min(len(lines), len(hashes) // merkle.SIZE)
        signed = self._history.newest
        covered = signed.checkpoint.size if signed else 0
        if begin + stored < covered:  # what is signed is never mended
            first = begin + stored
            raise AuditError(
                f"{self._paths.log}: entry {first} (line {first + 1}) is not what a"
                f" signed checkpoint of {covered} entries covers; {_ADVICE}"
            )
        mended = None
        cut = data[sum(len(line) + 1 for line in lines) :]
        if cut or hashes != expected or is_torn:
            mended = self._mend(begin + len(lines), cut, expected, stored)
        for line in lines:
            self._take(line)
        if signed and self._tree.root(covered) != signed.checkpoint.root:
            raise AuditError(
                f"{self._paths.log}: its first {covered} entries are not those that a"
                f" checkpoint was signed for; {_ADVICE}"
            )
        return mended

    def _mend(
        self, size: int, cut: bytes, expected: bytes, stored: int
    ) -> dict[str, Any]:
        """Cuts off what is not whole, after keeping it, and completes the hashes.

        Args:
          size: entries that are whole.
          cut: what follows them in log.jsonl.
          expected: the hashes of those that were not read before.
          stored: as many of them are in leaves.bin.
        """
        digest = hashlib.sha256(cut).hexdigest()
        kept = f"cut.{size}.{digest[:12]}" if cut else ""
        if cut:
            with contextlib.closing(audit.File(self._folder / kept)) as file:
                file.cut(0)  # of an attempt that a crash ended
                file.write(cut)
                file.sync()
        self._log.cut(self._log.size() - len(cut))
        stored *= merkle.SIZE
        self._leaves.cut(self._leaves.end + stored)
        self._leaves.write(expected[stored:])
        self._checkpoints.cut(self._checkpoints.end)
        self._sync(*self._files)
        about = {"entry": size, "bytes": len(cut), "sha256": digest, "kept": kept}
        return {"event": "recovered", **about}

    def _check_newest(self) -> None:
        """Brings `checkpoint` up to date, which a crash may have left behind."""
        path, newest = self._paths.checkpoint, self._newest().text
        text = path.read_bytes() if path.exists() else b""
        if text == newest.encode():
            return
        former = json.dumps(text.decode(errors="replace"))
        if text and former.encode() not in self._paths.checkpoints.read_bytes():
            raise AuditError(f"{path}: is not from checkpoints.jsonl; {_ADVICE}")
        private_files.write(path, newest)

    # Writing.

    def _write(self, line: bytes) -> int:
        """Appends a line and its hash, or neither, and returns its index."""
        index = self._tree.size
        with self._or_neither():
            self._log.write(line + b"\n")
            self._leaves.write(merkle.leaf(line))
        self._take(line)
        self._is_dirty = True
        return index

    def _take(self, line: bytes) -> None:
        """Takes an entry that is in the files into the tree."""
        self._tree.append(merkle.leaf(line))
        self._log.end += len(line) + 1
        self._leaves.end += merkle.SIZE
        if found := audit_entries.witness_of(line):
            peer, verifier = found
            self._witnesses[peer] = verifier

    def _note(self, what: dict[str, Any]) -> None:
        """Appends an entry about the log itself, on the disk at once."""
        self._write(audit_entries.encode("audit", self._clock(), self._lab, what))
        self._sync(self._log, self._leaves)

    def _newest(self) -> checkpoint_note.Note:
        newest = self._history.newest
        assert newest is not None  # even an empty log is signed
        return newest

    def _sign_empty(self) -> None:
        """Signs a log without entries: one that has no signature has lost it."""
        if self._tree.size:
            raise AuditError(
                f"{self._folder}: there are entries but no signed checkpoints: bring"
                " checkpoints.jsonl back from a copy"
            )
        self._sign()

    def _sign(self) -> None:
        name, tree = self._verifier.name, self._tree
        checkpoint = checkpoint_note.Checkpoint(name, tree.size, tree.root())
        self._record(checkpoint_note.sign(checkpoint, self._key))

    def _record(self, note: checkpoint_note.Note) -> None:
        """Keeps a signed checkpoint, or the newest one with one signature more."""
        line = checkpoint_note.encode(self._history, note.text)
        try:  # a line that would not be read again would end the log
            checkpoint_note.advance(self._history, line)
        except AuditError as error:
            path = self._paths.checkpoints
            raise AuditError(f"{path}: not written, the next line {error}") from None
        with self._or_neither():
            self._checkpoints.write(line + b"\n")
        self._sync(self._checkpoints)
        self._take_checkpoint(line)
        private_files.write(self._paths.checkpoint, note.text)

    @contextlib.contextmanager
    def _or_neither(self) -> Iterator[None]:
        """Leaves the files as they were if the disk does not take what is written."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError), self._or_refuse():
                for file in self._files:
                    file.cut(file.end)
            raise

    def _sync(self, *changed: audit.File) -> None:
        with self._or_refuse():
            for file in changed:
                file.sync()

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
        made = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
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
