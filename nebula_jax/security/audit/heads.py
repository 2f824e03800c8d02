"""The signed checkpoints of a copy of an audit log, and what is wrong with them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import history as audit_history


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


class Signed(NamedTuple):
    """A checkpoint whose signature holds."""

    checkpoint: checkpoint_note.Checkpoint
    name: str
    """Its name in a sentence."""
    is_seen: bool
    """True if it comes from a peer and not from the copy."""


def read(
    checkpoints: bytes,
    checkpoint: bytes,
    who: checkpoint_note.Verifier,
    witnesses: Sequence[str],
    seen: Sequence[str],
) -> tuple[list[Signed], list[Finding]]:
    """Reads all signed checkpoints that a copy has.

    Args:
      checkpoints: of checkpoints.jsonl; any bytes.
      checkpoint: of checkpoint; any bytes.
      who: the public key of the log.
      witnesses: public keys that peers have cosigned with, as the log has recorded.
      seen: notes of this log that others keep.

    Returns:
      Those that are signed with its key, the smallest first; and what is wrong.
    """
    keys = {(who.name, who.id): who}
    findings: list[Finding] = []
    for text in witnesses:
        try:
            key = checkpoint_note.read_verifier(text)
        except checkpoint_note.NoteError:
            continue  # its cosignatures will be those of an unknown key
        keys[key.name, key.id] = key
    signed, newest = _history(checkpoints, keys, who, findings)
    if not checkpoint or checkpoint != newest.encode():
        text = "is not the newest one in checkpoints.jsonl"
        findings.append(Finding("checkpoint", None, None, text))
        signed += _extra(checkpoint, "the checkpoint", False, who)
    for kept in seen:
        name = "the checkpoint that a peer has seen"
        found = _extra(kept.encode("utf-8", "replace"), name, True, who)
        here = {each.checkpoint for each in signed}
        if not found:
            text = "are signed with another key than what a peer has seen of it"
            findings.append(Finding("checkpoints.jsonl", None, None, text))
        elif found[0].checkpoint not in here:
            text = f"lacks {name}, of {found[0].checkpoint.size} entries"
            findings.append(Finding("checkpoints.jsonl", None, None, text))
        signed += found
    signed.sort(key=lambda each: (each.checkpoint.size, each.is_seen))
    findings += _equivocations(signed)
    return signed, findings


def _history(
    checkpoints: bytes,
    keys: dict[tuple[str, bytes], checkpoint_note.Verifier],
    who: checkpoint_note.Verifier,
    findings: list[Finding],
) -> tuple[list[Signed], str]:
    """Returns the checkpoints of checkpoints.jsonl and the text of the newest one."""
    *lines, rest = checkpoints.split(b"\n")
    history, signed = audit_history.History(), []
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        try:
            history = audit_history.advance(history, line)
        except audit_files.AuditError as error:
            text = f"{where} {error}"
            findings.append(Finding("checkpoints.jsonl", None, None, text))
            try:  # what is signed counts wherever it stands
                history = audit_history.History(line, audit_history.note_of(line))
            except audit_files.AuditError:
                continue
        note = history.newest
        assert note is not None
        bad = [
            each.name
            for each in note.signatures
            if not (key := keys.get((each.name, each.id)))
            or not checkpoint_note.is_signed(note._replace(signatures=(each,)), key)
        ]
        if bad:
            text = f"{where} has a signature of {bad[0]} that does not hold"
            findings.append(Finding("checkpoints.jsonl", None, None, text))
        if _is_own(note, who):
            name = f"the checkpoint in line {number} of checkpoints.jsonl"
            signed.append(Signed(note.checkpoint, name, False))
        else:
            text = f"{where} is not signed with the key of this log"
            findings.append(Finding("checkpoints.jsonl", None, None, text))
    if rest or not lines:
        text = "has no end of line" if rest else "has no checkpoint"
        findings.append(Finding("checkpoints.jsonl", None, None, text))
    return signed, history.newest.text if history.newest else ""


def _extra(
    data: bytes, name: str, is_seen: bool, who: checkpoint_note.Verifier
) -> list[Signed]:
    """Returns a checkpoint from elsewhere, in a list; [] if its signature fails."""
    try:
        note = checkpoint_note.read(data.decode())
    except (UnicodeDecodeError, checkpoint_note.NoteError):
        return []
    return [Signed(note.checkpoint, name, is_seen)] if _is_own(note, who) else []


def _is_own(note: checkpoint_note.Note, who: checkpoint_note.Verifier) -> bool:
    """Returns True if a note is of the log whose key this is, and signed with it."""
    is_its = note.checkpoint.origin == who.name
    return is_its and checkpoint_note.is_signed(note, who)


def _equivocations(signed: list[Signed]) -> list[Finding]:
    """Returns which sizes were signed with two roots: the lab has shown two logs."""
    findings = []
    for one, other in itertools.pairwise(signed):
        a, b = one.checkpoint, other.checkpoint
        if a.size == b.size and a.root != b.root:
            text = (
                f"has another root for {a.size} entries than {other.name}, both signed:"
                " the lab keeps two logs of one name"
            )
            findings.append(Finding(one.name, None, None, text))
    return findings
