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
import os
import pathlib
import time
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from nebula_jax.security import audit
from nebula_jax.security.audit import checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries

LINE_SECONDS = 0.1  # for a line that is being written


class Copy(NamedTuple):
    """The files of an audit log; the two that grow are read piece by piece."""

    log: BinaryIO
    checkpoint: bytes
    leaves: BinaryIO
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


class _Entries:
    """The entries that there are, read once; hashes of them alone are kept."""

    def __init__(self, copy: Copy) -> None:
        """Reads them, and the stored hashes."""
        self.tree = merkle.Tree()
        self.same, self.are_leaves = 0, True
        """So many of the first have the hashes that are stored; True if no others are
        stored."""
        self.unreadable: int | None = None
        """The first index whose line is not written as an entry is."""
        self.witnesses: list[tuple[str, str]] = []
        """Each peer and key of which there is an entry."""
        while line := copy.log.readline(audit_entries.MOST_BYTES + 2):
            if line[-1:] != b"\n":  # a switch may be writing it
                time.sleep(LINE_SECONDS)
                line += copy.log.readline(audit_entries.MOST_BYTES + 2)
            if line[-1:] != b"\n":
                break
            self._add(line[:-1], copy.leaves)
        self.has_end = not line
        self.are_leaves = self.are_leaves and not copy.leaves.read(1)

    def _add(self, entry: bytes, leaves: BinaryIO) -> None:
        hashed = merkle.leaf(entry)
        index = self.tree.append(hashed)
        if self.same == index and self.are_leaves:
            stored = leaves.read(merkle.SIZE)
            self.same += stored == hashed
            self.are_leaves = stored in (hashed, b"")
        if self.unreadable is None and not audit_entries.is_entry(entry):
            self.unreadable = index
        if found := audit_entries.witness_of(entry):
            self.witnesses.append(found)


def verify(
    folder: pathlib.Path,
    seen: Sequence[tuple[str, str]] = (),
    verifier: str | None = None,
) -> list[Finding]:
    """Verifies the audit log in a folder.

    Args:
      folder: `audit` of a lab, or a copy of its files.
      seen: labs with the checkpoint of this log that each keeps: `witness.Seen.note`.
        Without them a copy that was rolled back as a whole, or signed anew, or is not
        what the lab shows to another, cannot be found.
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
    findings = []
    if beside is None or (trusted or beside) != beside:
        text = "is missing, or not the public key of this log"
        findings.append(_of_file("verifier", text))
    if who := trusted or beside:
        with audit.disk_errors(folder), contextlib.ExitStack() as stack:
            copy = _opened(audit.paths(folder), stack)
            findings = examine(copy, who, seen) + findings
    return findings


def examine(
    copy: Copy,
    who: checkpoint_note.Verifier,
    seen: Sequence[tuple[str, str]] = (),
) -> list[Finding]:
    """Verifies the files of an audit log.

    Args:
      copy: any bytes.
      who: the public key of the log.
      seen: see `verify`.

    Returns:
      What is wrong, the first bad entry first.
    """
    signed, cosigned, findings = _checkpoints(copy, who, seen)
    entries = _Entries(copy)
    for peer, note in cosigned.items():
        if note is None or not _has_cosigned(note, peer, entries.witnesses):
            text = f"has a signature of {peer} that does not hold"
            findings.append(_of_file("cosigned.json", text))
    found = _compare(entries, copy.leaves, signed)
    if not entries.has_end:
        found.append(
            Finding("log.jsonl", entries.tree.size, None, "has no end of line")
        )
    if not found + findings and (first := entries.unreadable) is not None:
        found.append(
            Finding("log.jsonl", first, first, "is not written as an entry is")
        )
    return found + findings


def _compare(
    entries: _Entries, leaves: BinaryIO, signed: Sequence[_Signed]
) -> list[Finding]:
    """Compares the entries with the signed roots, and with their stored hashes."""
    good, tree = 0, entries.tree
    for each in signed:  # in the order of their sizes
        size = each.checkpoint.size
        if size > tree.size or tree.root(size) != each.checkpoint.root:
            return [_first_bad(entries, leaves, good, each)]
        good = size
    if entries.same < good or not entries.are_leaves:
        return [_of_file("leaves.bin", "has another hash; the entries are as signed")]
    return []


def _first_bad(entries: _Entries, leaves: BinaryIO, good: int, bad: _Signed) -> Finding:
    """Returns the finding about entries that a checkpoint does not cover as they are.

    Args:
      leaves: the stored hashes, if they are those that were signed.
      good: as many entries are right.
      bad: the first checkpoint that does not hold.
    """
    covered, size, first = bad.checkpoint.size, entries.tree.size, entries.same
    stored = merkle.Tree()
    leaves.seek(0)
    while (
        stored.size < covered and len(data := leaves.read(merkle.SIZE)) == merkle.SIZE
    ):
        stored.append(data)
    is_whole = stored.size == covered
    are_signed = is_whole and stored.root() == bad.checkpoint.root
    if are_signed and first < min(covered, size):
        return Finding("log.jsonl", first, first, "was altered")
    if size < covered:
        text = f"are missing: {bad.name} covers {covered} entries, and {size} are"
        first = size if is_whole else min(good, size)
        return Finding("log.jsonl", first, covered - 1, f"{text} here")
    text = f"are not those that {bad.name} covers: one of them was altered"
    return Finding("log.jsonl", good, covered - 1, text)


def _checkpoints(
    copy: Copy, who: checkpoint_note.Verifier, seen: Sequence[tuple[str, str]]
) -> tuple[list[_Signed], dict[str, checkpoint_note.Note | None], list[Finding]]:
    """Returns the checkpoints that its key has signed, by size, and what is wrong.

    Those that peers have cosigned are also returned by peer: whether their signatures
    hold, the entries show.
    """
    signed: list[_Signed] = []
    cosigned: dict[str, checkpoint_note.Note | None] = {}
    findings = []
    newest = _note(copy.checkpoint, who)
    if newest is None or len(newest.signatures) != 1:
        text = "is missing, or not signed with the key of this log"
        findings.append(_of_file("checkpoint", text))
    else:
        signed.append(_Signed(newest.checkpoint, "the checkpoint"))
    try:
        kept = checkpoint_note.read_cosigned(copy.cosigned or b"{}\n")
    except checkpoint_note.NoteError:
        findings.append(_of_file("cosigned.json", "is not as it was written"))
        kept = {}
    for peer, text in kept.items():
        cosigned[peer] = note = _note(text.encode(), who)
        if note is not None:
            name = f"the checkpoint that {peer} has cosigned"
            signed.append(_Signed(note.checkpoint, name))
    for peer, text in seen:
        note = _note(text.encode("utf-8", "replace"), who)
        if note is None:
            text = f"is signed with another key than what {peer} has seen of it"
            findings.append(_of_file("checkpoint", text))
            continue
        name = f"the checkpoint that {peer} has seen"
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
    return signed, cosigned, findings


def _has_cosigned(
    note: checkpoint_note.Note, peer: str, witnesses: Sequence[tuple[str, str]]
) -> bool:
    """Returns True if a key signs a note that the log names as that of a peer."""
    for lab, verifier in witnesses:
        if lab == peer:
            with contextlib.suppress(checkpoint_note.NoteError):
                who = checkpoint_note.read_verifier(verifier)
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


def _opened(paths: audit.Paths, stack: contextlib.ExitStack) -> Copy:
    """Opens the files until the stack ends; missing ones are empty.

    A switch appends meanwhile, and does not wait: read last, the log has all that the
    other files cover.
    """

    def opened(path: pathlib.Path) -> BinaryIO:
        found = path if path.exists() else pathlib.Path(os.devnull)
        return stack.enter_context(found.open("rb"))

    cosigned, checkpoint = (
        opened(paths.cosigned).read(),
        opened(paths.checkpoint).read(),
    )
    return Copy(opened(paths.log), checkpoint, opened(paths.leaves), cosigned)
