"""The audit log as a story: one line of plain words an entry.

    2026-11-22 14:03:11  ana began job m3 at commit d484d8e
    2026-11-22 14:03:40  lab-s opened a session with lab-t for job m3
    2026-11-22 15:10:02  switch carried 786.4 kB in 3 frames of hidden_grad for job m3

It is in the order of the log. Times are those of the machine's clock. Values come from
people and peers; what cannot be printed is replaced.
"""

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from nebula_jax import printable
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import phrases as audit_phrases

_DIGEST_RE = re.compile(r"[0-9a-f]{40,}")
_SIZES = ("bytes", "nbytes", "sent", "received", "quota_bytes", "disk_bytes")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def story(folder: pathlib.Path) -> Iterator[str]:
    """Yields a line for each entry of a log, which is not verified.

    Args:
      folder: `audit` of a lab, or a copy.

    Raises:
      audit_files.AuditError: if the log cannot be read.
    """
    latest = ""
    for index, line in enumerate(audit_entries.lines(folder)):
        try:
            entry = audit_entries.decode(index, line)
        except audit_files.AuditError:
            yield f"{'?':19}  entry {index} cannot be read: {printable.line(line)}"
            continue
        back = " (the clock was set back)" if entry.time < latest else ""
        latest = entry.time
        when = f"{entry.time[:10]} {entry.time[11:19]}"
        yield printable.line(f"{when}  {sentence(entry)}{back}", printable.LINE_LIMIT)


def sentence(entry: audit_entries.Entry) -> str:
    """Returns an entry in plain words, without its time."""
    kind, _, rest = entry.kind.partition(".")
    what = {name: each for name, each in entry.what.items() if each is not None}
    who = printable.line(entry.who) or "somebody"
    event = _text("event", what.get("event", rest))
    special = _SPECIAL.get((kind, event))
    if special:
        return special(who, what)
    default, phrases = audit_phrases.PHRASES.get(kind, (f"noted {kind}", {}))
    verb = audit_phrases.VERBS.get(entry.kind)
    if verb is None:
        verb = default if not event or "event" in phrases else event
        if kind not in audit_phrases.PHRASES:
            verb = f"{default} {event}".rstrip()
    if "event" not in phrases:
        what.pop("event", None)
    words = [
        phrase.format(_text(name, what.pop(name)))
        for name, phrase in phrases.items()
        if name in what
    ]
    return " ".join([who, verb, *words]) + _rest(what)


def _witness(who: str, what: dict[str, Any]) -> str:
    lab = _text("lab", what.get("lab"))
    if what.get("former"):
        return f"{lab} cosigns {who}'s log with a new key: what it had seen is lost"
    return f"{lab} cosigns {who}'s log from here on"


def _recovered(who: str, what: dict[str, Any]) -> str:
    size = _text("bytes", what.get("bytes", 0))
    entry = _text("entry", what.get("entry"))
    text = f"{who} cut {size} off where entry {entry} was half-written by a crash"
    kept = what.get("kept")
    return f"{text}, kept as {_text('kept', kept)}" if kept else text


def _received_list(who: str, what: dict[str, Any]) -> str:
    return f"{who} sent revocation list {_text('number', what.get('number'))}"


_SPECIAL: dict[tuple[str, str], Callable[[str, dict[str, Any]], str]] = {
    ("audit", "witness"): _witness,
    ("audit", "recovered"): _recovered,
    ("certificate", "list"): _received_list,
}


def _rest(what: dict[str, Any]) -> str:
    """Returns the values that no phrase has, in parentheses."""
    words = [f"{printable.line(name)} {_text(name, what[name])}" for name in what]
    return f" ({', '.join(words)})" if words else ""


def _text(name: str, value: Any) -> str:
    """Returns a value in words, fit to be printed."""
    if isinstance(value, list):
        return ", ".join(_text(name, each) for each in value)
    if isinstance(value, dict):
        return printable.line(json.dumps(value, sort_keys=True))
    if name in _SIZES and type(value) is int:
        return _size(value)
    if name in ("rows", "frames") and type(value) is int:
        return f"{value:,}"
    if isinstance(value, str) and _DIGEST_RE.fullmatch(value):
        return value[:12]
    return printable.line("nothing" if value is None else value)


def _size(count: int) -> str:
    """Returns a number of bytes in a unit that suits it.

    >>> _size(786_432)
    '786.4 kB'
    """
    size, unit = float(count), 0
    while size >= 999.95 and unit + 1 < len(_UNITS):
        size, unit = size / 1000, unit + 1
    return f"{count} bytes" if not unit else f"{size:.1f} {_UNITS[unit]}"
