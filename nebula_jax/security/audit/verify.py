"""Verification of an audit log, offline, of the lab's own folder or of a copy.

    for finding in audit_verify.verify(folder):
        print(finding)      # log.jsonl: entry 12 (line 13) was altered

The signed roots are what counts; they cover the entries. leaves.bin, which they cover
too, shows which line was altered. If it was changed alike, the entry lies between the
last checkpoint that still holds and the first that does not.

Whoever has the lab's key could have signed all of it anew: then the checkpoints that
peers have seen (`seen`) do not hold, as they do not for a copy that was rolled back.
What was appended since the last checkpoint, nothing protects.
"""

import contextlib
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax.security import audit
from nebula_jax.security.audit import checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries

LINE_SECONDS = 0.1  # for a line that is being written


class Copy(NamedTuple):
    """The bytes of the files of an audit log."""

    log: bytes
    checkpoint: bytes
    leaves: bytes
    cosigned: bytes


class Finding(NamedTuple):
    """A thing that is wrong with an audit log."""

    file: str
    """The name of the file."""
    first: int | None
    """The index of the first bad entry, from 0, or of where it is looked for."""
    last: int | None
    """The index of the last entry that can be meant."""
    problem: str

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.file} {self.problem}"
        first, last = self.first, self.last
        if last is None or last <= first:
            return f"{self.file}: entry {first} (line {first + 1}) {self.problem}"
        return (
            f"{self.file}: entries {first} to {last} (lines {first + 1} to {last + 1})"
            f" {self.problem}"
        )


class _Signed(NamedTuple):
    """A checkpoint whose signature holds."""

    checkpoint: checkpoint_note.Checkpoint
    name: str
    """Its name in a sentence."""


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
      AuditError: if a file cannot be read, or `verifier` is no public key.
    """
    trusted = None if verifier is None else checkpoint_note.read_verifier(verifier)
    with audit.disk_errors(folder):
        beside = None
        with contextlib.suppress(audit.AuditError):
            beside = checkpoint_note.verifier_of(folder)
        copy = _read(audit.paths(folder))
    findings = []
    if beside is None or (trusted or beside) != beside:
        text = "is missing, or not the public key of this log"
        findings.append(_of_file("verifier", text))
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
    tree = merkle.Tree(b"".join(map(merkle.leaf, lines)))
    signed, findings = _checkpoints(copy, who, lines, seen)
    found = _compare(tree, copy.leaves, signed)
    if rest:
        found.append(Finding("log.jsonl", len(lines), None, "has no end of line"))
    if found or findings:
        return found + findings
    for index, line in enumerate(lines):
        if not audit_entries.is_entry(line):
            return [Finding("log.jsonl", index, index, "is not written as an entry is")]
    return []


def _compare(
    tree: merkle.Tree, leaves: bytes, signed: Sequence[_Signed]
) -> list[Finding]:
    """Compares the entries with the signed roots, and with their stored hashes."""
    good = 0
    for each in signed:  # in the order of their sizes
        size = each.checkpoint.size
        if size > tree.size or tree.root(size) != each.checkpoint.root:
            return [_first_bad(tree, leaves, good, each)]
        good = size
    if len(leaves) < merkle.SIZE * good or not tree.leaves(0).startswith(leaves):
        return [_of_file("leaves.bin", "has another hash; the entries are as signed")]
    return []


def _first_bad(tree: merkle.Tree, leaves: bytes, good: int, bad: _Signed) -> Finding:
    """Returns the finding about entries that a checkpoint does not cover as they are.

    Args:
      tree: of the entries that there are.
      leaves: the stored hashes, if they are those that were signed.
      good: as many entries are right.
      bad: the first checkpoint that does not hold.
    """
    covered = bad.checkpoint.size
    stored = leaves[: merkle.SIZE * covered]
    is_whole = len(stored) == merkle.SIZE * covered
    if is_whole and merkle.Tree(stored).root() == bad.checkpoint.root:
        ours = tree.leaves(0)
        for first in range(min(covered, tree.size)):
            place = slice(merkle.SIZE * first, merkle.SIZE * (first + 1))
            if ours[place] != stored[place]:
                return Finding("log.jsonl", first, first, "was altered")
    if tree.size < covered:
        text = f"are missing: {bad.name} covers {covered} entries, and {tree.size} are"
        first = tree.size if is_whole else min(good, tree.size)
        return Finding("log.jsonl", first, covered - 1, f"{text} here")
    text = f"are not those that {bad.name} covers: one of them was altered"
    return Finding("log.jsonl", good, covered - 1, text)


def _checkpoints(
    copy: Copy,
    who: checkpoint_note.Verifier,
    lines: Sequence[bytes],
    seen: Sequence[str],
) -> tuple[list[_Signed], list[Finding]]:
    """Returns the checkpoints that its key has signed, by size, and what is wrong."""
    signed, findings = [], []
    newest = _note(copy.checkpoint, who)
    if newest is None or len(newest.signatures) != 1:
        text = "is missing, or not signed with the key of this log"
        findings.append(_of_file("checkpoint", text))
    else:
        signed.append(_Signed(newest.checkpoint, "the checkpoint"))
    cosigned: dict[str, str] = {}
    try:
        cosigned = checkpoint_note.read_cosigned(copy.cosigned or b"{}\n")
    except checkpoint_note.NoteError:
        findings.append(_of_file("cosigned.json", "is not as it was written"))
    for peer, text in cosigned.items():
        note = _note(text.encode(), who)
        if note is None or not _has_cosigned(note, peer, lines):
            text = f"has a signature of {peer} that does not hold"
            findings.append(_of_file("cosigned.json", text))
        else:
            name = f"the checkpoint that {peer} has cosigned"
            signed.append(_Signed(note.checkpoint, name))
    for text in seen:
        note = _note(text.encode("utf-8", "replace"), who)
        if note is None:
            text = "is signed with another key than what a peer has seen of it"
            findings.append(_of_file("checkpoint", text))
            continue
        name = "the checkpoint that a peer has seen"
        signed.append(_Signed(note.checkpoint, name))
        if newest is not None and newest.checkpoint.size < note.checkpoint.size:
            text = f"is older than {name}, of {note.checkpoint.size} entries"
            findings.append(_of_file("checkpoint", f"{text}: it was rolled back"))
    signed.sort(key=lambda each: each.checkpoint.size)
    for one, other in itertools.pairwise(signed):
        a, b = one.checkpoint, other.checkpoint
        if a.size == b.size and a.root != b.root:
            text = f"{one.name} and {other.name} have two roots of {a.size} entries"
            text += ", both signed: the lab keeps two logs of one name"
            findings.append(_of_file("checkpoint", text))
    return signed, findings


def _has_cosigned(
    note: checkpoint_note.Note, peer: str, lines: Sequence[bytes]
) -> bool:
    """Returns True if a key signs a note that the log names as that of a peer."""
    for line in lines:
        found = audit_entries.witness_of(line)
        if found is not None and found[0] == peer:
            with contextlib.suppress(checkpoint_note.NoteError):
                who = checkpoint_note.read_verifier(found[1])
                if checkpoint_note.is_signed(note, who):
                    return len(note.signatures) == 2
    return False


def _note(data: bytes, who: checkpoint_note.Verifier) -> checkpoint_note.Note | None:
    """Returns a checkpoint of this log; None if it is none, or its signature fails."""
    try:
        note = checkpoint_note.read(data.decode())
    except (UnicodeDecodeError, checkpoint_note.NoteError):
        return None
    return note if checkpoint_note.is_own(note, who) else None


def _of_file(name: str, problem: str) -> Finding:
    """Returns a finding that names no entry."""
    return Finding(name, None, None, problem)


def _read(paths: audit.Paths) -> Copy:
    """Reads the files; missing ones are empty.

    A switch appends meanwhile, and does not wait: read last, the log has all that the
    other files cover. A line that is being written has its end soon.
    """

    def contents(path: pathlib.Path) -> bytes:
        return path.read_bytes() if path.exists() else b""

    cosigned, checkpoint = contents(paths.cosigned), contents(paths.checkpoint)
    leaves, log = contents(paths.leaves), contents(paths.log)
    if not log.endswith(b"\n"):
        time.sleep(LINE_SECONDS)
        log = contents(paths.log)
    return Copy(log, checkpoint, leaves, cosigned)
