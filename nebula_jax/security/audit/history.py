"""The signed checkpoints of a log, in the order in which they were signed.

A line of checkpoints.jsonl is {"note": TEXT, "previous": SHA-256 of the line before}. A
checkpoint that a peer has cosigned follows as another line of the same size with one
signature more. Sizes never fall. The digests bind the lines to one another, so that one
that was lost by accident is missed; against a forger the signatures count alone.

With many checkpoints, the first bad entry of an altered log is known to be between two.
"""

import hashlib
import json
from typing import NamedTuple

from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import files as audit_files


class History(NamedTuple):
    """The signed checkpoints up to one line."""

    line: bytes = b""
    """The last line, without its end; the next one has its digest."""
    newest: checkpoint_note.Note | None = None
    """The note in it."""


def encode(history: History, text: str) -> bytes:
    """Returns the line for one more note, without its end."""
    value = {"note": text, "previous": _digest(history.line)}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def note_of(line: bytes) -> checkpoint_note.Note:
    """Returns the note in a line, wherever that stands.

    Raises:
      audit_files.AuditError: if there is none.
    """
    try:
        return checkpoint_note.read(json.loads(line)["note"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise audit_files.AuditError("is no signed checkpoint") from None
    except checkpoint_note.NoteError as error:
        raise audit_files.AuditError(f"is no signed checkpoint: {error}") from None


def advance(history: History, line: bytes) -> History:
    """Returns the history with one more line.

    Signatures are not verified.

    Args:
      history: up to the line before.
      line: any bytes, without its end.

    Raises:
      audit_files.AuditError: if it does not continue the history.
    """
    note, newest = note_of(line), history.newest
    if encode(history, note.text) != line:
        raise audit_files.AuditError("does not follow the line before it")
    if newest is None or newest.checkpoint.size < note.checkpoint.size:
        return History(line, note)
    if newest.checkpoint.size > note.checkpoint.size:
        raise audit_files.AuditError(
            f"has {note.checkpoint.size} entries after one of {newest.checkpoint.size}"
        )
    if note.checkpoint != newest.checkpoint:
        raise audit_files.AuditError(
            f"has another root for {note.checkpoint.size} entries: two logs of one name"
        )
    if not set(newest.signatures) < set(note.signatures):
        raise audit_files.AuditError("has no signature more than the line before it")
    return History(line, note)


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else ""
