"""The audit log of a site, open for more entries.

    with audit_log.Log(folder, "lab-s") as log:
        log.append("job", "ana", event="began", job="m3", commit="d484d8e")
        log.commit()                                # on the disk from here on
        head = log.sign_head()                      # for the peers, who cosign it

A signed head (`signed_heads.py`) states the size of the log and the root of its chain,
and so fixes every entry so far. Peers that cosign it keep it (`witness.py`): even the
lab itself, which has the key, can then not rewrite its log. What no head covers yet is
not protected, which is a reason to sign often.

One process at a time has the log open: the switch, or without one a command, which
otherwise has the switch append for it. Whoever appends waits for no disk: `commit` and
`sign_head` do. A crash may leave a part of a line: what follows the last whole entry is
cut off, kept and recorded. What a signed head covers was synced before. If that is not
whole, somebody or a bad disk changed it, and nothing is mended or appended.
"""

import contextlib
import datetime
import hashlib
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import disk, files
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import AuditError, signed_heads
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.tls import certificates

_ADVICE = "`nebula audit verify` names what was changed"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_WAITING = 1 << 24  # bytes of entries that wait for a disk that hangs or is full
MOST_LEAVES = 4096  # hashes of lines that a peer gets at once: 0.3 MB of a message


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
        """Opens the log of a lab, or begins it; compares all entries with its head.

        `folder` is `audit` in the folder of a federation; `clock` is for the times in
        the entries, which inform and decide nothing. Raises AuditError if the log
        cannot be read or written, or entries that a head covers have changed;
        private_files.PrivateFileError if others can read its key.
        """
        self._folder, self.lab, self._clock = folder, lab, clock
        self._paths = paths = audit.paths(folder)
        self._mutex = threading.Lock()  # held while an entry is appended
        self._syncing = threading.RLock()  # held while the disk writes: first of both
        self._waiting = bytearray()  # lines that are not on the disk yet
        self._refusal = ""  # why nothing is appended any more
        self._leaves: list[bytes] = []  # the hash of each line
        self._roots = [signed_heads.EMPTY]  # of no line, of the first, of two ...
        self._end = 0  # bytes of those in the file
        with audit.disk_errors(folder), contextlib.ExitStack() as stack:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.callback(os.close, _locked(paths))
            self._key = _load_key(paths)
            public = signed_heads.public(self._key)
            self.verifier = signed_heads.Verifier(lab, public)
            """The public key of this log, as peers are given it."""
            self._file = os.open(paths.log, _FLAGS, 0o600)
            stack.callback(os.close, self._file)
            disk.sync(folder)
            self._cosigned = signed_heads.cosigned_in(folder)
            newest = self._read_head()
            cut = self._read(newest)
            self._newest = newest or self._sign(0, signed_heads.EMPTY)
            private_files.write(paths.verifier, f"{self.verifier.text}\n")
            if cut:
                self.append("audit", self.lab, **self._mend(cut))
                self.commit()
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Closes the files, without `commit`: what waits is lost."""
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
        """Appends an entry, which `commit` or a head brings to disk; returns its index.

        `kind` is as in `job` or `account.add`; `what` has JSON values by name, of which
        `event` is a verb in the past tense. Raises AuditError, without appending, if it
        is no entry, there may be a secret in it, or too many wait for the disk.
        """
        with self._mutex:
            self._check_usable()
            if len(self._waiting) > MOST_WAITING:
                raise AuditError(f"{self._folder}: the disk takes no entries")
            now, index = self._clock(), len(self._leaves)
            salt = secrets.token_bytes(audit_entries.SALT_BYTES)
            line = audit_entries.encode(self._roots[-1], salt, kind, now, who, what)
            self._take(line)
            self._waiting += line + b"\n"
            return index

    @property
    def is_dirty(self) -> bool:
        """True if there are entries that a kill would take."""
        return bool(self._waiting)

    def commit(self) -> None:
        """Returns when all entries so far would outlive a power cut.

        Raises AuditError if the disk takes nothing, as when it is full: they wait for
        the next call. If the disk fails, nothing more can be appended.
        """
        with self._syncing, audit.disk_errors(self._folder):
            self._check_usable()
            if self.is_dirty:
                self._sync()

    def receipt(self, facts: bytes) -> bytes:
        """Signs what an entry is about, once all entries so far are on the disk.

        `facts` are those of a certificate (`tls.certificates.facts`), and no head.
        Raises AuditError if the disk fails.
        """
        self.commit()
        return self._key.sign(facts)

    def cosign(self, head: signed_heads.SignedHead) -> signed_heads.Cosignature:
        """Signs the head of a peer's log, which `witness.Witness` keeps."""
        return signed_heads.cosign(head, self.lab, self._key)

    def sign_head(self) -> signed_heads.SignedHead:
        """Signs what there is, once on the disk; raises AuditError if that fails."""
        with self._syncing, audit.disk_errors(self._folder):
            with self._mutex:
                self._check_usable()
                size, root = len(self._leaves), self._roots[-1]
            if size > self._newest.size:
                self._sync()
                self._newest = self._sign(size, root)
            return self._newest

    def head_after(self, seen: int) -> tuple[signed_heads.SignedHead, list[bytes]]:
        """Signs what there is, for a peer that has seen so many entries.

        Returns the newest head, or if that is too far from what the peer has seen one
        that is not; and the hashes of the lines between (`signed_heads.continues`).
        Raises signed_heads.HeadError if it never had so many, AuditError if it cannot
        be written.
        """
        newest = self.sign_head()
        if seen > newest.size:
            raise signed_heads.HeadError(f"it has {newest.size} entries, not {seen}")
        size = min(newest.size, seen + MOST_LEAVES) if seen else newest.size
        leaves = self._leaves[seen:size] if seen else []
        if size == newest.size:
            return newest, leaves
        root = self._roots[size]
        return signed_heads.sign(self.lab, size, root, self._key), leaves

    def cosigned(self, peer: str) -> int:
        """Returns the size of the newest head that a peer has cosigned, or 0.

        A peer that would continue from a smaller one has lost some of what it
        witnessed, perhaps by a restored backup.
        """
        return self._cosigned[peer][0].size if peer in self._cosigned else 0

    def add_cosignature(self, peer: str, text: str, cosignature: str) -> bool:
        """Keeps a peer's cosignature of a head, whose `text` was sent to it.

        Returns True if it is kept, False if the peer has cosigned as many entries
        before. Raises AuditError if it does not hold, or cannot be read or written.
        """
        head = signed_heads.read(text)
        by = signed_heads.read_cosignature(cosignature)
        if by.lab != peer or not signed_heads.is_cosigned(head, by):
            raise AuditError(f"{peer} sent a cosignature that does not hold")
        if not signed_heads.is_signed(head, self.verifier):
            raise AuditError(f"{peer} cosigned a head that is not of this log")
        with self._syncing, audit.disk_errors(self._folder):
            self._check_usable()
            if peer in self._cosigned and head.size <= self.cosigned(peer):
                return False
            self._cosigned = {**self._cosigned, peer: (head, by)}
            written = signed_heads.cosigned_text(self._cosigned)
            private_files.write(self._paths.cosigned, written)
            return True

    def _check_usable(self) -> None:
        if self._refusal:
            raise AuditError(self._refusal)

    # Opening.

    def _read(self, newest: signed_heads.SignedHead | None) -> bytes:
        """Takes the entries in; returns what follows the last whole one."""
        covered, root = (newest.size, newest.root) if newest else (0, "")
        with self._paths.log.open("rb") as stream:
            longest = audit_entries.MOST_BYTES + 1
            while (line := stream.readline(longest)).endswith(b"\n"):
                if newest is None:
                    raise AuditError(
                        f"{self._folder}: there are entries but no signed head: bring"
                        " the file `head` back from a copy"
                    )
                if len(self._leaves) >= covered and not (
                    audit_entries.is_after(line, self._roots[-1])
                    and audit_entries.is_entry(line[:-1])
                ):
                    break  # nothing that was synced follows
                self._take(line[:-1])
                self._end += len(line)
                if len(self._leaves) == covered and self._roots[-1].hex() != root:
                    raise AuditError(
                        f"{self._paths.log}: its first {covered} entries are not those"
                        f" that a head was signed for; {_ADVICE}"
                    )
            stream.seek(self._end)
            cut = stream.read()
        if (size := len(self._leaves)) < covered:
            raise AuditError(
                f"{self._paths.log}: entry {size} (line {size + 1}) is missing, and a"
                f" signed head covers {covered}; {_ADVICE}"
            )
        return cut

    def _read_head(self) -> signed_heads.SignedHead | None:
        path = self._paths.head
        try:
            text = path.read_bytes().decode("ascii", "replace")
            head = signed_heads.read(text.removesuffix("\n"))
        except FileNotFoundError:
            return None
        except signed_heads.HeadError as error:
            raise AuditError(f"{path}: {error}; {_ADVICE}") from None
        if not signed_heads.is_signed(head, self.verifier):
            raise AuditError(
                f"{path}: is not signed with the key of this log; {_ADVICE}"
            )
        return head

    def _mend(self, cut: bytes) -> dict[str, Any]:
        """Cuts off what is not whole, after keeping it; returns what is recorded."""
        digest, size = hashlib.sha256(cut).hexdigest(), len(self._leaves)
        kept = self._folder / f"cut.{size}.{digest[:12]}"
        with files.writing(kept) as partial:
            partial.write_bytes(cut)
        os.ftruncate(self._file, self._end)
        self._sync()
        about = {"entry": size, "bytes": len(cut), "sha256": digest, "kept": kept.name}
        return {"event": audit_entries.CUT_OFF, **about}

    # Writing.

    def _take(self, line: bytes) -> None:
        self._leaves.append(signed_heads.leaf(line))
        root = signed_heads.chained(self._roots[-1], self._leaves[-1:])
        self._roots.append(root)

    def _sign(self, size: int, root: bytes) -> signed_heads.SignedHead:
        """Signs entries that are on the disk."""
        head = signed_heads.sign(self.lab, size, root, self._key)
        private_files.write(self._paths.head, f"{head.text}\n")
        return head

    def _sync(self) -> None:
        """Writes what waits, or nothing of it, and returns when it is on the disk."""
        with self._mutex:  # and not below: others append meanwhile
            left = data = bytes(self._waiting)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError), self._or_refuse():
                os.ftruncate(self._file, self._end)
            raise
        with self._or_refuse():
            os.fdatasync(self._file)
        self._end += len(data)
        with self._mutex:
            del self._waiting[: len(data)]

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


def _load_key(paths: audit.Paths) -> ed25519.Ed25519PrivateKey:
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
    return key
