"""Text folders: the project's own corpus format, read and checked line by line.

    mono/LANG.{train,valid}.txt[.gz]          one sentence a line, no header
    parallel/en-LANG.{train,dev,test}.tsv[.gz] header `en<TAB>LANG[<TAB>source]`
    mono/families.json                         optional, groupings for K generators

UTF-8, LF. LANG is an ISO 639-1 code such as `sw`.
"""

import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from nebula_jax import errors

LANGUAGES = tuple(
    [
        "en",
        "fr",
        "es",
        "de",
        "el",
        "bg",
        "ru",
        "tr",
        "ar",
        "vi",
        "th",
        "zh",
        "hi",
        "sw",
        "ur",
    ]
)
"""The 15 languages of XNLI, in the order of the paper's Table 1."""


class CorpusError(errors.NebulaError):
    """A text folder lacks something, or a line of it is malformed."""


class Pair(NamedTuple):
    """A sentence and its translation (TRTD, section 3.1)."""

    english: str
    foreign: str


def check_folder(data_dir: pathlib.Path) -> None:
    """Raises CorpusError unless `data_dir` looks like a text folder with text."""
    if not data_dir.is_dir():
        raise CorpusError(f"--data_dir={data_dir}: there is no such folder")
    if not any(data_dir.glob("mono/*.train.txt*")):
        raise CorpusError(
            f"--data_dir={data_dir}: no text in it; expected files such as"
            f" {data_dir}/mono/en.train.txt.gz (the layout is in README.md)"
        )


def mono_path(data_dir: pathlib.Path, language: str, split: str) -> pathlib.Path:
    """The monolingual file of a language; `split` is `train` or `valid`."""
    return _existing(data_dir / "mono" / f"{language}.{split}.txt", language)


def parallel_path(data_dir: pathlib.Path, language: str, split: str) -> pathlib.Path:
    """The English-LANG file; `split` is `train`, `dev` or `test`."""
    return _existing(data_dir / "parallel" / f"en-{language}.{split}.tsv", language)


def _existing(path: pathlib.Path, language: str) -> pathlib.Path:
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise CorpusError(f"language {language!r} has no text: {path}[.gz] is missing")


def numbered_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of a file's lines; gzip if its name says so.

    Raises:
      CorpusError: at bad UTF-8, or if it cannot be read to its end.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                yield number, raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}:{number}: not UTF-8 ({error.reason})") from None
    except (EOFError, OSError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be read after line {number}: {error}") from (
            None
        )


def read_mono(path: pathlib.Path) -> Iterator[str]:
    """Yields the sentences of a monolingual file.

    Raises:
      CorpusError: with file and line, at an empty line, a NUL byte or bad UTF-8;
        and when the file has no line at all.
    """
    number = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            raise CorpusError(f"{path}:{number}: empty line; expected a sentence")
        if "\0" in line:
            raise CorpusError(f"{path}:{number}: NUL byte in a sentence")
        yield line
    if number == 0:
        raise CorpusError(f"{path}: has no lines")


def read_parallel(path: pathlib.Path) -> Iterator[Pair]:
    """Yields the pairs of a parallel file, without its header.

    Raises:
      CorpusError: with file and line, where the header or a line has not two or
        three tab-separated fields, or a side of a pair is empty.
    """
    width = 0
    number = 0
    for number, line in numbered_lines(path):
        fields = line.split("\t")
        if number == 1:
            if len(fields) not in (2, 3) or fields[0] != "en":
                raise CorpusError(
                    f"{path}:1: header is {line!r}; expected en<TAB>LANG[<TAB>source]"
                )
            width = len(fields)
            continue
        if len(fields) != width:
            raise CorpusError(
                f"{path}:{number}: {len(fields)} tab-separated fields; expected {width}"
            )
        if not fields[0].strip() or not fields[1].strip():
            raise CorpusError(f"{path}:{number}: one side of the pair is empty")
        yield Pair(fields[0], fields[1])
    if number < 2:
        raise CorpusError(f"{path}: has no pairs")


def families(data_dir: pathlib.Path, generators: int) -> list[list[str]]:
    """The folder's own grouping of languages for `generators` generators.

    Args:
      data_dir: a text folder with `mono/families.json`.
      generators: K, the number of groups.

    Returns:
      K lists of language codes (the grouping by family of section 3.1).

    Raises:
      CorpusError: if the folder has no grouping for that K.
    """
    path = data_dir / "mono" / "families.json"
    hint = ' write the groups out, as in --generators="en de|hi ur"'
    try:
        groupings = json.loads(path.read_text("utf-8"))["example_clusters"]
        found = groupings[f"K={generators}"]
    except FileNotFoundError:
        raise CorpusError(
            f"--generators={generators}: {path} is missing;{hint}"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise CorpusError(
            f"--generators={generators}: {path} has no grouping K={generators};{hint}"
        ) from None
    if not _is_grouping(found, generators):
        raise CorpusError(f"{path}: K={generators} is not that many lists of languages")
    return found


def _is_grouping(found: object, generators: int) -> bool:
    if not isinstance(found, list) or len(found) != generators:
        return False
    if not all(isinstance(group, list) and group for group in found):
        return False
    names = [language for group in found for language in group]
    return all(isinstance(n, str) for n in names) and len(set(names)) == len(names)


def digest(path: pathlib.Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of(parts: list) -> str:
    """A short digest of values, for names of derived files."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
