"""The audit log for people: who did what, a line an entry.

    2026-11-22 14:03:11  ana: job began (commit d484d8e, job m3)
    2026-11-22 14:03:40  ana: account suspend (after suspended, before active, name bob)
    2026-11-22 15:10:02  ana@lab-s: stream (bytes 786432, frames 3, kind hidden_grad)

It is in the order of the log. Times are those of the machine's clock. Values come from
people and peers; what cannot be printed is replaced.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from nebula_jax import printable
from nebula_jax.security.audit import AuditError
from nebula_jax.security.audit import entries as audit_entries


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
    who, event = printable.line(entry.who) or "somebody", _text(what.pop("event", ""))
    said = f"{who}: {entry.kind.replace('.', ' ')} {event}".rstrip()
    values = [f"{printable.line(name)} {_text(what[name])}" for name in what]
    return f"{said} ({', '.join(values)})" if values else said


def _text(value: Any) -> str:
    """Returns a value as text that is fit to be printed."""
    return printable.line(value if isinstance(value, str) else json.dumps(value))
