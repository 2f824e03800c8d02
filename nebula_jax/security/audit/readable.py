"""The audit log for people: who did what, a line an entry.

    2026-11-22 14:03:11  ana: job began (commit d484d8e, job m3)
    2026-11-22 14:03:40  ana: account suspend (after suspended, before active, name bob)
    2026-11-22 15:10:02  ana@lab-s: stream (bytes 786.4 kB, frames 3, kind hidden_grad)

It is in the order of the log. Times are those of the machine's clock. Values come from
people and peers; what cannot be printed is replaced.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from nebula_jax import printable
from nebula_jax.security.audit import AuditError
from nebula_jax.security.audit import entries as audit_entries

_DIGEST_RE = re.compile(r"[0-9a-f]{40,}")
_SIZES = ("bytes", "nbytes", "sent", "received", "quota_bytes")


def lines(folder: pathlib.Path) -> Iterator[str]:
    """Yields a line for each entry of a log, which is not verified.

    Args:
      folder: `audit` of a lab, or a copy.

    Raises:
      AuditError: if the log cannot be read.
    """
    latest = ""
    for index, line in enumerate(audit_entries.lines(folder)):
        try:
            entry = audit_entries.decode(index, line)
        except AuditError:
            yield f"{'?':19}  entry {index} cannot be read: {printable.line(line)}"
            continue
        back = " (the clock was set back)" if entry.time < latest else ""
        latest = entry.time
        when = f"{entry.time[:10]} {entry.time[11:19]}"
        text = f"{when}  {_sentence(entry)}{back}"
        yield printable.line(text, printable.LINE_LIMIT)


def _sentence(entry: audit_entries.Entry) -> str:
    """Returns an entry without its time."""
    what = {name: each for name, each in entry.what.items() if each is not None}
    who, event = printable.line(entry.who) or "somebody", what.pop("event", "")
    said = f"{who}: {entry.kind.replace('.', ' ')} {_text('event', event)}".rstrip()
    values = [f"{printable.line(name)} {_text(name, what[name])}" for name in what]
    return f"{said} ({', '.join(values)})" if values else said


def _text(name: str, value: Any) -> str:
    """Returns a value in words, fit to be printed."""
    if isinstance(value, list):
        return ", ".join(_text(name, each) for each in value)
    if isinstance(value, dict):
        return printable.line(json.dumps(value, sort_keys=True))
    if name in _SIZES and type(value) is int:
        return printable.size(value)
    if name in ("rows", "frames") and type(value) is int:
        return f"{value:,}"
    if isinstance(value, str) and _DIGEST_RE.fullmatch(value):
        return value[:12]
    return printable.line("nothing" if value is None else value)
