"""Text files read strictly: lines, and tables with a header and tabs between fields.

UTF-8, gzip if the file's name ends so. A byte-order mark at the beginning of a line,
where editors and `cat` leave them, is no text. A quotation mark is, wherever it stands:
a reader that takes it for CSV's swallows all lines up to the next one.

Every error names file and line. None quotes text, because errors may be sent to another
cluster; ids, which both clusters have, are quoted.
"""

import codecs
import contextlib
import gzip
import itertools
import pathlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from nebula_jax import errors

NUL = re.compile("\0")
# Unicode's controls and its two line separators; a tab cannot be in a field.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_LONE_CR = re.compile(rb"\r(?![\r\n])")


class CorpusError(errors.NebulaError):
    """A corpus that lacks a file, or a line of it that is malformed."""


class NoCorpusError(CorpusError, errors.SettingsError):
    """A corpus, or a language of one, that a setting names and that is not there."""


def plain_or_gzip(path: pathlib.Path) -> pathlib.Path | None:
    """Returns `path` or `path`.gz, whichever is a file; None if neither is."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def lines(
    path: pathlib.Path, given: Iterable[bytes] | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of a file's lines, from 1, without LF or CRLF.

    A CR alone is text, unless it ends the first line: then every one ends a line.
    With `given`, a stream is read in the file's place; errors name it by `path`.
    Raises CorpusError at bad UTF-8, or if the file cannot be read to its end.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            stream = given or stack.enter_context(opener(path, "rb"))
            for number, raw in enumerate(_split(stream), start=1):
                line = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
                yield number, line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}:{number}: not UTF-8 ({error.reason})") from None
    except (EOFError, OSError, zlib.error) as error:
        raise CorpusError(
            f"{path}: cannot be read after line {number}: {error}"
        ) from None


def _split(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file, whose first line says what ends them."""
    parts = iter(stream)
    first = next(parts, b"")
    parts = itertools.chain([first] if first else [], parts)
    if _LONE_CR.search(first):
        return (line for part in parts for line in part.splitlines())
    return parts


def header(path: pathlib.Path) -> list[str]:
    """Reads a table's column names, [""] if empty; raises CorpusError as `lines`."""
    _, line = next(lines(path), (1, ""))
    return line.split("\t")


def rows(
    path: pathlib.Path,
    columns: Sequence[str],
    *,
    exact: bool = False,
    unique: str | None = None,
    may_be_empty: Collection[str] = (),
    forbidden: re.Pattern[str] = NUL,
) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, the fields of `columns`) of a table.

    Raises CorpusError at another header, another number of fields, an empty field, a
    forbidden character, a repeated value, bad UTF-8; and if there is no row.

    Args:
      columns: names, in the order wanted.
      exact: the header must have these columns in this order, and no others.
      unique: a column in which no value may come twice.
      may_be_empty: columns whose fields may be empty or blank.
      forbidden: characters that may not be in a field of `columns`.
    """
    numbered = lines(path)
    _, line = next(numbered, (1, ""))
    names = line.split("\t")
    _check_header(path, names, columns, exact)
    places = [names.index(name) for name in columns]
    seen: dict[str, int] = {}
    number = 1
    for number, line in numbered:
        fields = line.split("\t")
        if len(fields) != len(names):
            raise CorpusError(
                f"{path}:{number}: {len(fields)} tab-separated fields; expected"
                f" {len(names)}{quotation_hint(line)}"
            )
        row = [fields[place] for place in places]
        for name, field in zip(columns, row, strict=True):
            if not field.strip() and name not in may_be_empty:
                raise CorpusError(f"{path}:{number}: {name} is empty")
            if found := forbidden.search(field):
                raise CorpusError(
                    f"{path}:{number}: control character U+{ord(found[0]):04X} in"
                    f" {name}"
                )
        if unique is not None:
            value = row[columns.index(unique)]
            if value in seen:
                raise CorpusError(
                    f"{path}:{number}: {unique} {value!r} is in line {seen[value]}"
                    " already"
                )
            seen[value] = number
        yield number, row
    if number == 1:
        raise CorpusError(f"{path}: has no rows below its header")


def _check_header(
    path: pathlib.Path, names: Sequence[str], columns: Sequence[str], exact: bool
) -> None:
    missing = [repr(name) for name in columns if name not in names]
    twice = [repr(name) for name in columns if names.count(name) > 1]
    if missing:
        problem = f"no column {', '.join(missing)}"
    elif twice:
        problem = f"more than one column {', '.join(twice)}"
    elif exact and len(names) != len(columns):
        problem = f"{len(names)} columns"
    elif exact and list(names) != list(columns):
        problem = "its columns in another order"
    else:
        return
    raise CorpusError(
        f"{path}:1: the header has {problem}; expected {'<TAB>'.join(columns)}"
        f"{', nothing else' if exact else ''}{quotation_hint(''.join(names))}"
    )


def quotation_hint(text: str) -> str:
    """Returns a remark for an error if `text` has a quotation mark; else ""."""
    if '"' not in text:
        return ""
    return "; a quotation mark is text here, and quotes no tab or line break"
