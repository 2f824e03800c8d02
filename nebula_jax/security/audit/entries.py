r"""Entries of the audit log: one line each, in the one spelling it can have.

    {"after":"0ac9...","kind":"grant","salt":"77d1...",
     "time":"2026-11-22T14:03:11.250Z","what":{...},"who":"ana"}  (without line breaks)

JSON with sorted keys, without spaces, in printable ASCII: a newline, an escape sequence
or a mark that turns the reading direction is written as \u000a, \u001b, \u202e, so a
value can neither begin a line of its own nor do anything to a terminal. An entry's
number is its place, and `after` the root of all lines before it (`signed_heads`). The
salt is 16 random bytes: witnesses get a hash of each line, and must not find out what
is in it by trying what might be. Its time is the clock of the machine and only informs:
a clock that is set back changes no order.

Secrets must not be in it: a value whose name ends in password, token, key, secret or
the like is refused, and so is any text with a private key or an invitation in it. A
text of a peer keeps no entry out: it goes through `without_secret` first.
"""

import contextlib
import datetime
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nebula_jax import printable
from nebula_jax.security import audit

MOST_BYTES = 65_536  # of a line: more would be data, which does not belong here
MOST_CHARACTERS = 4_096  # of a text in it; a longer one, as a peer may send, is cut
MOST_LEVELS = 8
_LARGEST = 2**64  # of a number; what other readers of JSON make of more differs
_KIND_RE = re.compile(r"[a-z][a-z0-9_.-]{0,47}")
_TIME_RE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_SECRET_NAME_RE = re.compile(
    r"(pass(word|phrase|wd|code)|secret|token|(?<!public_)key|credential|invitation)s?$",
    re.IGNORECASE,
)
_SECRET_RE = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|nebula1\.[A-Za-z0-9_-]{16}")
HIDDEN = "(may be a secret)"  # in place of a peer's text that an entry must not have
_FIELDS = {"after", "kind", "salt", "time", "what", "who"}
SALT_BYTES = 16
_ROOT_RE = re.compile(r"[0-9a-f]{64}")
_SALT_RE = re.compile(r"[0-9a-f]{32}")
CUT_OFF = "cut off"  # an event that a log notes about itself


class Entry(NamedTuple):
    """An entry of the log."""

    number: int  # from 0; it is in line `number + 1`
    kind: str
    time: str  # UTC, as in 2026-11-22T14:03:11.250Z; informative only
    who: str
    what: dict[str, Any]  # JSON values


def may_be_secret(text: str) -> bool:
    """Returns True if there may be a private key or an invitation in a text."""
    return bool(_SECRET_RE.search(text))


def without_secret(text: str) -> str:
    """Returns a text of a peer as an entry takes it; HIDDEN if it may be a secret.

    >>> without_secret("held_out")
    'held_out'
    """
    return HIDDEN if may_be_secret(text) else text


def encode(
    after: bytes,
    salt: bytes,
    kind: str,
    time: datetime.datetime,
    who: str,
    what: Mapping[str, Any],
) -> bytes:
    """Returns the line of an entry, without its end.

    Args:
      after: the root of all lines before it.
      salt: SALT_BYTES that nobody can guess.
      kind: small letters, as `grant` or `account.add`.
      time: of a zone; by this machine's clock.
      who: did it, or where it happened; any text.
      what: JSON values by name; a number that JSON has not becomes null.

    Raises:
      audit.AuditError: if a value is or could be a secret, or is no JSON; or if it is
        too long.
    """
    if not _KIND_RE.fullmatch(kind):
        raise audit.AuditError(f"{printable.line(kind)} is no kind of an entry")
    stamp = time.astimezone(datetime.UTC).isoformat(timespec="milliseconds")
    line = _canonical(
        {
            "after": after.hex(),
            "kind": kind,
            "salt": salt.hex(),
            "time": stamp.replace("+00:00", "Z"),
            "what": _clean(what, kind, 0),
            "who": _clean(str(who), f"{kind}: who", 0)[: printable.LIMIT],
        }
    )
    if len(line) > MOST_BYTES:
        raise audit.AuditError(
            f"{kind}: an entry of {len(line)} bytes; at most {MOST_BYTES} fit a line"
        )
    return line


def decode(index: int, line: bytes) -> Entry:
    """Reads the entry `index`, from 0, from its line (any bytes), without its end.

    Raises audit.AuditError if `encode` cannot have written it.
    """
    try:
        if len(line) > MOST_BYTES:
            raise ValueError("too long")
        value = json.loads(line)
        if not isinstance(value, dict) or _canonical(value) != line:
            raise ValueError("another spelling")
    except (ValueError, RecursionError):
        value = {}
    what = value.get("what")
    if (
        value.keys() != _FIELDS
        or not isinstance(what, dict)
        or not all(isinstance(value[each], str) for each in _FIELDS - {"what"})
        or not _ROOT_RE.fullmatch(value["after"])
        or not _KIND_RE.fullmatch(value["kind"])
        or not _SALT_RE.fullmatch(value["salt"])
        or not _TIME_RE.fullmatch(value["time"])
    ):
        raise audit.AuditError(
            f"log.jsonl: entry {index} (line {index + 1}) is not written as one"
        )
    return Entry(index, value["kind"], value["time"], value["who"], what)


def is_entry(line: bytes) -> bool:
    """Returns True if `encode` can have written a line."""
    with contextlib.suppress(audit.AuditError):
        decode(0, line)
        return True
    return False


def is_after(line: bytes, root: bytes) -> bool:
    """Returns True if a line says that it follows those with this root."""
    return line.startswith(f'{{"after":"{root.hex()}",'.encode())


def lines(folder: pathlib.Path) -> Iterator[bytes]:
    """Yields the lines of a folder's log, without their ends.

    Leaves out a last line that is just being written. Raises audit.AuditError if the
    log cannot be read, or a line is longer than any can be.
    """
    path = audit.paths(folder).log
    with audit.disk_errors(path), path.open("rb") as stream:
        index = 0
        while line := stream.readline(MOST_BYTES + 2):
            if line[-1:] == b"\n":
                yield line[:-1]
            elif len(line) > MOST_BYTES:
                raise audit.AuditError(
                    f"{path}: line {index + 1} is longer than {MOST_BYTES} bytes"
                )
            index += 1


def read(folder: pathlib.Path) -> Iterator[Entry]:
    """Yields the entries, not verified; raises AuditError that names a bad line."""
    for index, line in enumerate(lines(folder)):
        yield decode(index, line)


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("\x7f", "\\u007f").encode("ascii")


def _clean(value: Any, where: str, level: int) -> Any:
    """Returns a value as it is written; raises if it must not be."""
    if isinstance(value, str):
        if may_be_secret(value):
            raise audit.AuditError(
                f"{printable.line(where)}: an audit entry must not have a secret in it"
            )
        return value[:MOST_CHARACTERS]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if level < MOST_LEVELS and isinstance(value, list | tuple):
        return [_clean(each, where, level + 1) for each in value]
    if level < MOST_LEVELS and isinstance(value, Mapping):
        return {
            _name(name, each, where): _clean(each, f"{where}: {name}", level + 1)
            for name, each in value.items()
        }
    raise audit.AuditError(
        f"{printable.line(where)}: a {type(value).__name__} is no JSON value that an"
        " audit entry takes"
    )


def _name(name: Any, value: Any, where: str) -> str:
    """Returns the name of a value; raises if such a value is a secret."""
    if not isinstance(name, str):
        raise audit.AuditError(f"{where}: the name {name!r} is no text")
    if found := _SECRET_NAME_RE.search(name):
        # Numbers of tokens or keys are counts; other numbers may be a PIN.
        is_count = found[0].endswith("s") and isinstance(value, int)
        if value is not None and not is_count:
            raise audit.AuditError(
                f"{printable.line(where)}: {printable.line(name)} may be a secret,"
                " which must not be in the audit log"
            )
    return name
