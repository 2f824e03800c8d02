"""Text folders: the project's own corpus format, read and checked line by line.

    mono/LANG.{train,valid}.txt[.gz]          one sentence a line, no header
    parallel/en-LANG.{train,dev,test}.tsv[.gz] header `en<TAB>LANG[<TAB>source]`
    mono/families.json                         optional, groupings for K generators

UTF-8, LF. LANG is an ISO 639-1 code such as `sw`.
"""

import json
import pathlib
import re
from collections.abc import Iterator

from nebula_jax.data import tsv

LANGUAGES = (
    *("en", "fr", "es", "de", "el", "bg", "ru", "tr"),
    *("ar", "vi", "th", "zh", "hi", "sw", "ur"),
)
"""The 15 languages of XNLI, in the order of the paper's Table 1."""

CorpusError = tsv.CorpusError

_TRAIN = re.compile(r"([^.]+)\.train\.txt(?:\.gz)?")  # of a file's name


def check_folder(data_dir: pathlib.Path) -> None:
    """Raises CorpusError unless `data_dir` looks like a text folder with text."""
    if not data_dir.is_dir():
        raise tsv.NoCorpusError(f"data_dir={data_dir}: there is no such folder")
    if not any(data_dir.glob("mono/*.train.txt*")):
        raise tsv.NoCorpusError(
            f"data_dir={data_dir}: no text in it; expected files such as"
            f" {data_dir}/mono/en.train.txt.gz (see experiments/m3/README.md)"
        )


def languages(data_dir: pathlib.Path) -> list[str]:
    """Lists the languages with text to train on, in alphabetical order.

    Raises:
      CorpusError: if it has none.
    """
    check_folder(data_dir)
    names = (_TRAIN.fullmatch(path.name) for path in (data_dir / "mono").iterdir())
    return sorted({found[1] for found in names if found})


def mono_path(data_dir: pathlib.Path, language: str, split: str) -> pathlib.Path:
    """Finds the monolingual file of a language.

    Args:
      language: ISO 639-1 code.
      split: `train` or `valid`.

    Raises:
      CorpusError: if there is none.
    """
    return _existing(data_dir / "mono" / f"{language}.{split}.txt", language)


def parallel_path(data_dir: pathlib.Path, language: str, split: str) -> pathlib.Path:
    """Finds the English-LANG file of a language.

    Args:
      language: ISO 639-1 code, not `en`.
      split: `train`, `dev` or `test`.

    Raises:
      CorpusError: if there is none.
    """
    return _existing(data_dir / "parallel" / f"en-{language}.{split}.tsv", language)


def _existing(path: pathlib.Path, language: str) -> pathlib.Path:
    existing = tsv.plain_or_gzip(path)
    if existing is None:
        raise tsv.NoCorpusError(
            f"language {language!r} has no text: {path}[.gz] is missing"
        )
    return existing


def read_mono(path: pathlib.Path) -> Iterator[str]:
    """Yields the sentences of a monolingual file.

    Raises:
      CorpusError: with file and line, at an empty line, a NUL byte or bad UTF-8;
        and when the file has no line at all.
    """
    number = 0
    for number, line in tsv.lines(path):
        if not line.strip():
            raise CorpusError(f"{path}:{number}: empty line; expected a sentence")
        if "\0" in line:
            raise CorpusError(f"{path}:{number}: NUL byte in a sentence")
        yield line
    if number == 0:
        raise CorpusError(f"{path}: has no lines")


def read_parallel(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a parallel file: the English sentence, its translation.

    Args:
      path: of the file; `en-LANG` in its name says what the second column has to be.

    Raises:
      CorpusError: with file and line, at another header or number of fields, an empty
        side of a pair, a NUL byte or bad UTF-8; and when the file has no pair.
    """
    columns = ["en", path.name.partition(".")[0].removeprefix("en-")]
    header = tsv.header(path)
    if header not in (columns, [*columns, "source"]):
        raise CorpusError(
            f"{path}:1: header is {'<TAB>'.join(header)!r}; by the file's name it is"
            f" {'<TAB>'.join(columns)}[<TAB>source]"
        )
    for _, (english, foreign) in tsv.rows(path, columns):
        yield english, foreign


def families(data_dir: pathlib.Path, generators: int) -> list[list[str]]:
    """Reads a folder's grouping of languages for K generators.

    Args:
      data_dir: a text folder with `mono/families.json`.
      generators: K, the number of groups.

    Returns:
      K lists of language codes (the grouping by family of section 3.1).

    Raises:
      CorpusError: if the folder has no grouping for that K.
    """
    path = data_dir / "mono" / "families.json"
    hint = ' write the groups out, as in generators="en de|hi ur"'
    try:
        groupings = json.loads(path.read_text("utf-8-sig"))["example_clusters"]
        found = groupings[f"K={generators}"]
    except FileNotFoundError:
        raise tsv.NoCorpusError(
            f"generators={generators}: {path} is missing;{hint}"
        ) from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise tsv.NoCorpusError(
            f"generators={generators}: {path} has no grouping K={generators};{hint}"
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
