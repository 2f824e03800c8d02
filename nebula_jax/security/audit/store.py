"""An audit log on disk: appended to, followed when others append, mended after a crash.

Whoever uses a Store holds the lock of its folder meanwhile. Nothing in its files is
ever changed but for the end, and that only where no signed checkpoint covers it.
"""

import hashlib
import os
import pathlib
from typing import Any, NamedTuple

from nebula_jax import disk
from nebula_jax.security import private_files
from nebula_jax.security.audit import checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import history as audit_history
from nebula_jax.security.audit import tail as audit_tail
from nebula_jax.security.audit.files import AuditError

_ADVICE = "`nebula audit verify` names what was changed"


class Growing(NamedTuple):
    """An open file to which other processes append too."""

    path: pathlib.Path
    descriptor: int

    def size(self) -> int:
        """Returns its bytes."""
        return os.fstat(self.descriptor).st_size

    def cut(self, end: int) -> None:
        """Cuts off what comes after a position.

        Raises:
          OSError: if the disk fails.
        """
        os.ftruncate(self.descriptor, end)


class Store:
    """The entries, their tree and the signed checkpoints of one log."""

    def __init__(self, paths: audit_files.Paths, who: checkpoint_note.Verifier):
        """Opens the files, made if missing; `follow` reads them.

        Args:
          paths: of the files; their folder is there.
          who: the public key of the log.

        Raises:
          OSError: if the disk fails.
        """
        self.tree = merkle.Tree()
        self.history = audit_history.History()
        self.witnesses: dict[str, str] = {}
        """Peer -> the public key with which it cosigns at present."""
        self.cosigned: dict[str, int] = {}
        """Name of a signer -> size of the newest checkpoint that it signed."""
        self.refusal = ""
        """Text that states why nothing is appended any more."""
        self._paths, self._who = paths, who
        self._opened: list[int] = []
        self._log = self._open(paths.log)
        self._leaves = self._open(paths.leaves)
        self._checkpoints = self._open(paths.checkpoints)
        self._log_end = self._checkpoints_end = 0  # as far as they were read
        self._lines = 0  # of checkpoints.jsonl
        disk.sync(paths.log.parent)

    def close(self) -> None:
        """Closes the files."""
        while self._opened:
            os.close(self._opened.pop())

    def follow(self) -> dict[str, Any] | None:
        """Takes in what was appended since, and mends what a dead process left.

        Returns:
          What was mended, for an entry about it; None if nothing had to be.

        Raises:
          AuditError: if what a checkpoint covers has changed: nothing is appended
            until somebody has looked at it.
          OSError: if the disk fails.
        """
        ends = self._log.size(), self._leaves.size(), self._checkpoints.size()
        before = self._log_end, merkle.SIZE * self.tree.size, self._checkpoints_end
        if ends == before:
            return None
        try:
            if any(end < was for end, was in zip(ends, before, strict=True)):
                raise AuditError(
                    f"{self._paths.log.parent}: files of the audit log became shorter"
                    f" while it was open; {_ADVICE}"
                )
            return self._follow(*ends)
        except AuditError as error:
            self.refusal = str(error)
            raise

    def write(self, line: bytes) -> int:
        """Appends a line and its hash, or neither, and returns its index.

        Raises:
          OSError: if the disk does not take it.
        """
        hashed, index = merkle.leaf(line), self.tree.size
        self._append(self._log, line + b"\n", self._log_end)
        try:
            self._append(self._leaves, hashed, merkle.SIZE * index)
        except OSError:
            self._undo(self._log, self._log_end)
            raise
        self._take(line, hashed)
        return index

    def sync(self) -> None:
        """Returns when all entries would outlive a power cut.

        Raises:
          OSError: if the disk fails. What is lost then, another sync would not show:
            nothing is appended any more.
        """
        self._sync(self._log)
        self._sync(self._leaves)

    def record(self, note: checkpoint_note.Note) -> None:
        """Keeps a signed checkpoint, or the newest one with one signature more.

        Raises:
          AuditError: if it would not be read again; then nothing is written.
          OSError: if the disk does not take it.
          private_files.PrivateFileError: likewise.
        """
        line = audit_history.encode(self.history, note.text)
        try:
            audit_history.advance(self.history, line)
        except AuditError as error:
            path = self._paths.checkpoints
            raise AuditError(f"{path}: not written, the next line {error}") from None
        self._append(self._checkpoints, line + b"\n", self._checkpoints_end)
        self._sync(self._checkpoints)
        self._take_checkpoint(line)
        private_files.write(self._paths.checkpoint, note.text)

    def check_checkpoint(self) -> None:
        """Brings `checkpoint` up to date, which a crash may have left behind.

        Raises:
          AuditError: if it is not an older one.
          OSError: if the disk fails.
        """
        path, newest = self._paths.checkpoint, self.history.newest
        text = path.read_bytes() if path.exists() else b""
        if newest is None or text == newest.text.encode():
            return
        try:
            older = checkpoint_note.read(text.decode()) if text else None
            is_older = older is None or (
                older.checkpoint.size <= newest.checkpoint.size
                and checkpoint_note.is_signed(older, self._who)
            )
        except (UnicodeDecodeError, checkpoint_note.NoteError):
            is_older = False
        if not is_older:
            raise AuditError(f"{path}: is not from checkpoints.jsonl; {_ADVICE}")
        private_files.write(path, newest.text)

    def _open(self, path: pathlib.Path) -> Growing:
        opened = audit_files.open_to_append(path)
        self._opened.append(opened)
        return Growing(path, opened)

    def _follow(self, log: int, leaves: int, checkpoints: int) -> dict[str, Any] | None:
        """Reads the files to these ends."""
        torn = self._follow_checkpoints(checkpoints)
        begin = self.tree.size
        tail = audit_tail.read(
            audit_files.read_on(self._log.descriptor, self._log_end, log),
            audit_files.read_on(self._leaves.descriptor, merkle.SIZE * begin, leaves),
            begin,
        )
        signed = self.history.newest
        covered = signed.checkpoint.size if signed else 0
        if begin + tail.whole < covered:
            first = begin + tail.whole
            raise AuditError(
                f"{self._paths.log}: entry {first} (line {first + 1}) is not what a"
                f" signed checkpoint of {covered} entries covers; {_ADVICE}"
            )
        mended = None if tail.is_whole and not torn else self._mend(tail, torn)
        for line, hashed in zip(tail.lines, tail.hashes, strict=True):
            self._take(line, hashed)
        if signed and self.tree.root(covered) != signed.checkpoint.root:
            raise AuditError(
                f"{self._paths.log}: its first {covered} entries are not those that a"
                f" checkpoint was signed for; {_ADVICE}"
            )
        return mended

    def _follow_checkpoints(self, end: int) -> bytes:
        """Reads new checkpoints; returns what is left of a line without an end."""
        data = audit_files.read_on(
            self._checkpoints.descriptor, self._checkpoints_end, end
        )
        *lines, torn = data.split(b"\n")
        for line in lines:
            self._take_checkpoint(line)
        newest = self.history.newest
        if lines and not (
            newest
            and newest.checkpoint.origin == self._who.name
            and checkpoint_note.is_signed(newest, self._who)
        ):
            raise AuditError(
                f"{self._paths.checkpoints}: line {self._lines} is not signed with the"
                f" key of this log; {_ADVICE}"
            )
        return torn

    def _take_checkpoint(self, line: bytes) -> None:
        try:
            self.history = audit_history.advance(self.history, line)
        except AuditError as error:
            raise AuditError(
                f"{self._paths.checkpoints}: line {self._lines + 1} {error}; {_ADVICE}"
            ) from None
        self._lines += 1
        self._checkpoints_end += len(line) + 1
        assert self.history.newest is not None
        for each in self.history.newest.signatures:
            self.cosigned[each.name] = self.history.newest.checkpoint.size

    def _take(self, line: bytes, hashed: bytes) -> None:
        """Takes an entry that is in the files into the tree."""
        self.tree.append(hashed)
        self._log_end += len(line) + 1
        if found := audit_entries.witness_of(line):
            peer, verifier = found
            self.witnesses[peer] = verifier

    def _mend(self, tail: audit_tail.Tail, torn: bytes) -> dict[str, Any]:
        """Cuts off what is not whole, after keeping it, and completes the hashes."""
        begin = self.tree.size
        entry = begin + len(tail.lines)
        digest = hashlib.sha256(tail.cut).hexdigest()
        kept = ""
        if tail.cut:
            kept = f"cut.{entry}.{digest[:12]}"
            self._keep(self._paths.log.parent / kept, tail.cut)
        self._log.cut(self._log_end + sum(len(line) + 1 for line in tail.lines))
        self._leaves.cut(merkle.SIZE * (begin + tail.whole))
        audit_files.write_all(
            self._leaves.descriptor, b"".join(tail.hashes[tail.whole :])
        )
        self._checkpoints.cut(self._checkpoints_end)
        self.sync()
        self._sync(self._checkpoints)
        return {
            "event": "recovered",
            "entry": entry,
            "lines": tail.cut.count(b"\n"),
            "bytes": len(tail.cut),
            "sha256": digest,
            "kept": kept,
            "hashes_cut": tail.stray,
            "hashes_added": len(tail.hashes) - tail.whole,
            "checkpoint_bytes": len(torn),
        }

    def _keep(self, path: pathlib.Path, data: bytes) -> None:
        opened = audit_files.open_to_append(path)
        try:
            os.ftruncate(opened, 0)  # of an attempt that a crash ended
            audit_files.write_all(opened, data)
            os.fsync(opened)
        finally:
            os.close(opened)

    def _append(self, file: Growing, data: bytes, end: int) -> None:
        """Appends to a file that ends at `end`; if that fails it ends there again."""
        try:
            audit_files.write_all(file.descriptor, data)
        except OSError:
            self._undo(file, end)
            raise

    def _undo(self, file: Growing, end: int) -> None:
        try:
            file.cut(end)
        except OSError as error:
            self._refuse(file, error)

    def _sync(self, file: Growing) -> None:
        try:
            os.fdatasync(file.descriptor)
        except OSError as error:
            self._refuse(file, error)
            raise

    def _refuse(self, file: Growing, error: OSError) -> None:
        self.refusal = (
            f"{file.path}: the disk failed ({error.strerror}), so the audit log takes"
            " no more entries: mend it and start again"
        )
