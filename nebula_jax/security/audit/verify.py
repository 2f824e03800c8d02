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
import io
import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax.security import audit
from nebula_jax.security.audit import AuditError, checkpoint_note, merkle
from nebula_jax.security.audit import entries as audit_entries


class Copy(NamedTuple):
    """The bytes of the files of an audit log."""

    log: bytes
    leaves: bytes
    checkpoints: bytes
    checkpoint: bytes


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
    is_seen: bool
    """True if it comes from a peer and not from the copy."""


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
    paths = audit.paths(folder)
    trusted = None if verifier is None else checkpoint_note.read_verifier(verifier)
    with audit.disk_errors(folder):
        beside = None
        with contextlib.suppress(AuditError):
            beside = checkpoint_note.verifier_of(folder)
        copy = _read(paths)
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
    hashes = [merkle.leaf(line) for line in lines]
    whole = len(copy.leaves) // merkle.SIZE * merkle.SIZE
    stored = [copy.leaves[i : i + merkle.SIZE] for i in range(0, whole, merkle.SIZE)]
    witnesses = [found for line in lines if (found := audit_entries.witness_of(line))]
    keys = _keys(who, [text for _, text in witnesses])
    signed, bad_checkpoints = _checkpoints(copy, who, keys, seen)
    findings = _compare(hashes, stored, signed)
    if rest:
        findings.append(Finding("log.jsonl", len(lines), None, "has no end of line"))
    if whole != len(copy.leaves):
        findings.append(Finding("leaves.bin", len(stored), None, "is cut off"))
    return findings + bad_checkpoints + (_misspelled(lines) if not findings else [])


# Entries and their hashes against the signed roots.


def _compare(
    hashes: list[bytes], stored: list[bytes], signed: list[_Signed]
) -> list[Finding]:
    """Compares entries, their stored hashes and the signed roots with one another."""
    tree, other = merkle.Tree(b"".join(hashes)), merkle.Tree(b"".join(stored))
    good, bad = _first_that_fails(tree, signed)
    if hashes == stored:
        return [] if bad is None else [_altered_alike("log.jsonl", tree, good, bad)]
    first = next(
        (i for i, (a, b) in enumerate(zip(hashes, stored, strict=False)) if a != b),
        min(len(hashes), len(stored)),
    )
    stored_good, stored_bad = _first_that_fails(other, signed)
    if bad is None and stored_bad is None:
        text = "and its hash in leaves.bin differ; no checkpoint covers them yet"
        return [Finding("log.jsonl", first, first, text)]
    if bad is None:
        text = "has another hash in leaves.bin; the entry is as it was signed"
        return [Finding("leaves.bin", first, first, text)]
    found = Finding("log.jsonl", first, first, _what_happened(hashes, stored, first))
    if stored_bad is None:
        return [found]
    if first < stored_good:  # up to there the hashes are those that were signed
        return [found, _altered_alike("leaves.bin", other, stored_good, stored_bad)]
    return [_altered_alike("log.jsonl", tree, good, bad)]


def _first_that_fails(
    tree: merkle.Tree, signed: list[_Signed]
) -> tuple[int, _Signed | None]:
    """Returns up to where checkpoints hold, and the first one that does not."""
    good = 0
    for each in signed:  # in the order of their sizes
        size = each.checkpoint.size
        if size > tree.size or tree.root(size) != each.checkpoint.root:
            return good, each
        good = size
    return good, None


def _altered_alike(file: str, tree: merkle.Tree, good: int, bad: _Signed) -> Finding:
    """Returns the finding about entries that a checkpoint does not cover as they are.

    Args:
      file: that has them, or their hashes.
      tree: of what is in it.
      good: as many of them are right.
      bad: the first checkpoint that does not hold.
    """
    size, covered = tree.size, bad.checkpoint.size
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
    is_gone = hashes[first : first + 1] == stored[first + 1 : first + 2]
    is_moved = stored[first : first + 1] == hashes[first + 1 : first + 2]
    if is_gone and is_moved:
        return "was exchanged with the next one"
    if is_gone:
        return "is missing: the next one stands in its place"
    return "was put in before another" if is_moved else "was altered"


def _misspelled(lines: list[bytes]) -> list[Finding]:
    """Returns the first entry that `audit_entries.encode` cannot have written."""
    for index, line in enumerate(lines):
        if not audit_entries.is_entry(line):
            text = "is signed, but is not written as an entry is"
            return [Finding("log.jsonl", index, index, text)]
    return []


# The signed checkpoints.


def _keys(
    who: checkpoint_note.Verifier, witnesses: Sequence[str]
) -> dict[tuple[str, bytes], checkpoint_note.Verifier]:
    """Returns the keys that may sign: of the log, and those that it has recorded."""
    found = [who]
    for text in witnesses:  # cosignatures of a bad one will be of an unknown key
        with contextlib.suppress(checkpoint_note.NoteError):
            found.append(checkpoint_note.read_verifier(text))
    return {(each.name, each.id): each for each in found}


def _checkpoints(
    copy: Copy,
    who: checkpoint_note.Verifier,
    keys: dict[tuple[str, bytes], checkpoint_note.Verifier],
    seen: Sequence[str],
) -> tuple[list[_Signed], list[Finding]]:
    """Reads all signed checkpoints that there are of a log.

    Args:
      copy: of the log.
      who: the public key of the log.
      keys: that may sign.
      seen: notes of this log that others keep.

    Returns:
      Those that are signed with its key, the smallest first; and what is wrong.
    """
    signed, newest, findings = _history(copy.checkpoints, who, keys)
    if not copy.checkpoint or copy.checkpoint != newest.encode():
        text = "is not the newest one in checkpoints.jsonl"
        findings.append(_of_file("checkpoint", text))
        signed += _extra(copy.checkpoint, "the checkpoint", False, who)
    for kept in seen:
        name = "the checkpoint that a peer has seen"
        found = _extra(kept.encode("utf-8", "replace"), name, True, who)
        if not found:
            text = "are signed with another key than what a peer has seen of it"
            findings.append(_of_file("checkpoints.jsonl", text))
        elif found[0].checkpoint not in {each.checkpoint for each in signed}:
            text = f"lacks {name}, of {found[0].checkpoint.size} entries"
            findings.append(_of_file("checkpoints.jsonl", text))
        signed += found
    signed.sort(key=lambda each: (each.checkpoint.size, each.is_seen))
    for one, other in itertools.pairwise(signed):
        a, b = one.checkpoint, other.checkpoint
        if a.size == b.size and a.root != b.root:
            text = (
                f"has another root for {a.size} entries than {other.name}, both signed:"
                " the lab keeps two logs of one name"
            )
            findings.append(_of_file(one.name, text))
    return signed, findings


def _history(
    checkpoints: bytes,
    who: checkpoint_note.Verifier,
    keys: dict[tuple[str, bytes], checkpoint_note.Verifier],
) -> tuple[list[_Signed], str, list[Finding]]:
    """Returns those of checkpoints.jsonl, the text of the newest, what is wrong."""
    *lines, rest = checkpoints.split(b"\n")
    history, signed, problems = checkpoint_note.History(), [], []
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        try:
            history = checkpoint_note.advance(history, line)
        except AuditError as error:
            problems.append(f"{where} {error}")
            try:  # what is signed counts wherever it stands
                history = checkpoint_note.History(line, checkpoint_note.note_of(line))
            except AuditError:
                continue
        note = history.newest
        assert note is not None
        for each in note.signatures:
            key = keys.get((each.name, each.id))
            only = note._replace(signatures=(each,))
            if key is None or not checkpoint_note.is_signed(only, key):
                problems.append(
                    f"{where} has a signature of {each.name} that does not hold"
                )
                break
        if checkpoint_note.is_own(note, who):
            name = f"the checkpoint in line {number} of checkpoints.jsonl"
            signed.append(_Signed(note.checkpoint, name, False))
        else:
            problems.append(f"{where} is not signed with the key of this log")
    if rest or not lines:
        problems.append("has no end of line" if rest else "has no checkpoint")
    findings = [_of_file("checkpoints.jsonl", text) for text in problems]
    return signed, history.newest.text if history.newest else "", findings


def _extra(
    data: bytes, name: str, is_seen: bool, who: checkpoint_note.Verifier
) -> list[_Signed]:
    """Returns a checkpoint from elsewhere, in a list; [] if its signature fails."""
    try:
        note = checkpoint_note.read(data.decode())
    except (UnicodeDecodeError, checkpoint_note.NoteError):
        return []
    is_own = checkpoint_note.is_own(note, who)
    return [_Signed(note.checkpoint, name, is_seen)] if is_own else []


def _of_file(name: str, problem: str) -> Finding:
    """Returns a finding that names no entry."""
    return Finding(name, None, None, problem)


def _read(paths: audit.Paths) -> Copy:
    """Reads the files as they are at one moment; missing ones are empty.

    A lab's own processes append meanwhile, and must not wait for it: under their lock,
    which a copy has not, files are opened and measured, and read after it.
    """
    unchanging = (
        audit.locked(paths.lock, shared=True)
        if paths.lock.exists()
        else contextlib.nullcontext()
    )
    with contextlib.ExitStack() as stack:
        with unchanging:
            streams = [
                stack.enter_context(path.open("rb")) if path.exists() else io.BytesIO()
                for path in paths[: len(Copy._fields)]
            ]
            sizes = [each.seek(0, io.SEEK_END) for each in streams]
        for each in streams:
            each.seek(0)
        contents = zip(streams, sizes, strict=True)
        return Copy._make(each.read(size) for each, size in contents)
