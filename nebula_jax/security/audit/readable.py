"""The audit log for people: one line of plain words an entry.

    2026-11-22 14:03:11  ana began job m3 at commit d484d8e
    2026-11-22 14:03:40  lab-s opened a session with lab-t for job m3
    2026-11-22 15:10:02  switch carried 786.4 kB in 3 frames of hidden_grad for job m3

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

MESSAGES = {
    "federation": "changed|federation {name}|lab {lab}|with {peer}|at {address}"
    "|from {host}",
    "certificate": "issued|the certificate of {lab}|for its {role}|number {serial}"
    "|until {until}|revocation list {number}",
    "account": "changed|account {name}|of user {uid}|from {before}|to {after}",
    "grant": "gave|grant {number}|to {subject}|on {handle}"
    "|up to {rows} rows|up to {nbytes}|until {until}",
    "data": "used|data {handle}|with {rows} rows|of {nbytes}|in job {job}",
    "job": "began|job {job}|at commit {commit}|at step {step}",
    "session": "opened|a session with {peer}|a session with {lab}|for job {job}"
    "|after sending {sent}|and receiving {received}|because of {reason}",
    "stream": "carried|{bytes}|in {frames} frames|of {kind}|for job {job}"
    "|on stream {stream}|({direction})|with {peer}",
    "checkpoint": "saved|a checkpoint of job {job}|at step {step}|with {digest}",
    "refusal": "was refused|{operation}|because of {reason}|in job {job}|with {peer}",
    "fault": "met a fault:|{event}|{fault}|with {peer}|in job {job}|at step {step}",
    "audit": "noted|lab {lab}|which has lost what it saw under {former}|{bytes}"
    "|where entry {entry} was half-written",
}
"""Kind -> the verb of an entry without an event, and the words for its values in order.

An event is a verb in the past tense, unless one of the words takes it. A kind may go on
after a point: `account.add`. Values without words follow in parentheses.
"""
VERBS = {
    "account.add": "added",
    "account.suspend": "suspended",
    "account.resume": "resumed",
    "account.remove": "removed",
    "account.limits": "changed the limits of",
    "data.register": "registered",
    "data.withdraw": "withdrew",
    "grant.give": "gave",
    "grant.revoke": "revoked",
}
"""A kind with a point -> its verb; of another, what stands after the point serves."""
_FIELD_RE = re.compile(r"\{(\w+)\}")
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
    """Returns an entry in plain words, without its time."""
    kind, _, rest = entry.kind.partition(".")
    what = {name: each for name, each in entry.what.items() if each is not None}
    who = printable.line(entry.who) or "somebody"
    event = _text("event", what.get("event", rest))
    default, *words = MESSAGES.get(kind, f"noted {kind}").split("|")
    names = {word: _FIELD_RE.search(word)[1] for word in words}  # type: ignore[index]
    verb = VERBS.get(entry.kind)
    if verb is None:
        verb = default if not event or "event" in names.values() else event
        if kind not in MESSAGES:
            verb = f"{default} {event}".rstrip()
    if "event" not in names.values():
        what.pop("event", None)
    said = [
        word.replace(f"{{{name}}}", _text(name, what.pop(name)))
        for word, name in names.items()
        if name in what
    ]
    others = [f"{printable.line(name)} {_text(name, what[name])}" for name in what]
    return " ".join([who, verb, *said]) + (f" ({', '.join(others)})" if others else "")


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
