"""Verification of an audit log, offline, of the lab's own folder or of a copy.

    for finding in audit_verify.verify(folder):
        print(finding)      # log.jsonl: entry 12 (line 13) was altered

The signed roots are what counts; they cover the entries. leaves.bin, which they cover
too, shows which line was altered, or that a hash was. If both were changed alike, the
entry lies between the last checkpoint that still holds and the first that does not.

Whoever has the lab's key could have signed all of it anew: then the checkpoints that
peers have seen (`seen`) do not hold, as they do not for a copy that was rolled back.
What was appended since the last checkpoint, nothing protects.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nebula_jax.security.audit import checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import heads as audit_heads
from nebula_jax.security.audit.heads import Finding, Signed


class Copy(NamedTuple):
    """The bytes of the files of an audit log."""

    log: bytes
    leaves: bytes
    checkpoints: bytes
    checkpoint: bytes


def verify(
    folder: pathlib.Path, seen: Sequence[str] = (), verifier: str | None = None
) -> list[Finding]:
    """Verifies the audit log in a folder.

    Args:
      folder: `audit` of a lab, or a copy of its files.
      seen: checkpoints of this log that others keep: `witness.Seen.note`. Without them
        a copy that was rolled back as a whole, or signed anew, cannot be found.
      verifier: the public key of the log as the reader has it from elsewhere; None for
        the one in the folder, which whoever changed the copy could have changed too.

    Returns:
      What is wrong, the first bad entry first; [] if nothing is.

    Raises:
      audit_files.AuditError: if a file cannot be read.
      checkpoint_note.NoteError: if `verifier` is no public key.
    """
    paths = audit_files.paths(folder)
    trusted = None if verifier is None else checkpoint_note.read_verifier(verifier)
    with _unchanging(paths.lock):
        there = _read(paths.verifier)
        copy = Copy(
            _read(paths.log),
            _read(paths.leaves),
            _read(paths.checkpoints),
            _read(paths.checkpoint),
        )
    try:
        beside = checkpoint_note.read_verifier(there.decode().removesuffix("\n"))
    except (UnicodeDecodeError, checkpoint_note.NoteError):
        beside = None
    findings = []
    if beside is None or (trusted or beside) != beside:
        findings.append(
            Finding(
                "verifier", None, None, "is missing, or not the public key of this log"
            )
        )
    if who := trusted or beside:
        findings = examine(copy, who, seen) + findings
    return findings


def examine(
    copy: Copy, who: checkpoint_note.Verifier, seen: Sequence[str] = ()
) -> list[Finding]:
    """Verifies the bytes of an audit log.

    Args:
      copy: any bytes.
      who: the public key of the log.
      seen: see `verify`.

    Returns:
      What is wrong, the first bad entry first.
    """
    *lines, rest = copy.log.split(b"\n")
    hashes = [merkle.leaf(line) for line in lines]
    whole = len(copy.leaves) // merkle.SIZE * merkle.SIZE
    stored = [copy.leaves[i : i + merkle.SIZE] for i in range(0, whole, merkle.SIZE)]
    witnesses = [found for line in lines if (found := audit_entries.witness_of(line))]
    signed, bad_heads = audit_heads.read(
        copy.checkpoints, copy.checkpoint, who, [text for _, text in witnesses], seen
    )
    findings = _compare(hashes, stored, signed)
    if rest:
        findings.append(Finding("log.jsonl", len(lines), None, "has no end of line"))
    if whole != len(copy.leaves):
        findings.append(Finding("leaves.bin", len(stored), None, "is cut off"))
    return findings + bad_heads + (_misspelled(lines) if not findings else [])


def _compare(
    hashes: list[bytes], stored: list[bytes], signed: list[Signed]
) -> list[Finding]:
    """Compares entries, their stored hashes and the signed roots with one another."""
    first = next(
        (i for i, (a, b) in enumerate(zip(hashes, stored, strict=False)) if a != b),
        min(len(hashes), len(stored)),
    )
    differ = hashes != stored
    tree = merkle.Tree(b"".join(hashes))
    good, bad = _first_that_fails(tree, signed)
    if not differ:
        return (
            [] if bad is None else [_altered_alike("log.jsonl", tree.size, good, bad)]
        )
    other = merkle.Tree(b"".join(stored))
    stored_good, stored_bad = _first_that_fails(other, signed)
    found = Finding("log.jsonl", first, first, _what_happened(hashes, stored, first))
    if bad is None and stored_bad is None:
        text = "and its hash in leaves.bin differ; no checkpoint covers them yet"
        return [Finding("log.jsonl", first, first, text)]
    if bad is None:
        text = "has another hash in leaves.bin; the entry is as it was signed"
        return [Finding("leaves.bin", first, first, text)]
    if stored_bad is None:
        return [found]
    if first < stored_good:  # up to there the hashes are those that were signed
        more = _altered_alike("leaves.bin", other.size, stored_good, stored_bad)
        return [found, more]
    return [_altered_alike("log.jsonl", tree.size, good, bad)]


def _first_that_fails(
    tree: merkle.Tree, signed: list[Signed]
) -> tuple[int, Signed | None]:
    """Returns up to where checkpoints hold, and the first one that does not.

    Args:
      tree: of a copy.
      signed: in the order of their sizes.
    """
    good = 0
    for each in signed:
        size = each.checkpoint.size
        if size > tree.size or tree.root(size) != each.checkpoint.root:
            return good, each
        good = size
    return good, None


def _altered_alike(file: str, size: int, good: int, bad: Signed) -> Finding:
    """Returns the finding about entries that a checkpoint does not cover as they are.

    Args:
      file: that has them, or their hashes.
      size: entries in it.
      good: as many are right.
      bad: the first checkpoint that does not hold.
    """
    covered = bad.checkpoint.size
    if size < covered and bad.is_seen:
        text = (
            f"are missing: {bad.name} has {covered} entries and this copy {size}: it"
            " was rolled back"
        )
        return Finding(file, size, covered - 1, text)
    if size < covered:
        text = f"are missing: {bad.name} covers {covered} entries"
        return Finding(file, min(good, size), covered - 1, text)
    text = f"are not those that {bad.name} covers: one of them was altered"
    return Finding(file, good, covered - 1, text)


def _what_happened(hashes: list[bytes], stored: list[bytes], first: int) -> str:
    """Returns what happened to an entry, by the hashes of it and its neighbors."""
    if first >= len(hashes):
        return f"is missing: the log ends after {len(hashes)} entries"
    if first >= len(stored):
        return "was put in: the log that was signed ends before it"
    is_gone = hashes[first] == (stored[first + 1 : first + 2] or [b""])[0]
    is_moved = stored[first] == (hashes[first + 1 : first + 2] or [b""])[0]
    if is_gone and is_moved:
        return "was exchanged with the next one"
    if is_gone:
        return "is missing: the next one stands in its place"
    if is_moved:
        return "was put in before another"
    return "was altered"


def _misspelled(lines: list[bytes]) -> list[Finding]:
    """Returns the first entry that `audit_entries.encode` cannot have written."""
    for index, line in enumerate(lines):
        try:
            audit_entries.decode(index, line)
        except audit_files.AuditError:
            text = "is signed, but is not written as an entry is"
            return [Finding("log.jsonl", index, index, text)]
    return []


def _read(path: pathlib.Path) -> bytes:
    """Returns the bytes of a file; those of a missing one are empty."""
    with audit_files.disk_errors(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""


@contextlib.contextmanager
def _unchanging(path: pathlib.Path) -> Iterator[None]:
    """Keeps the lab's own processes from appending meanwhile; a copy has no lock."""
    try:
        lock = audit_files.Lock(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with lock.held(shared=True):
            yield
    finally:
        lock.close()
