"""Text folders: the project's own corpus format, read and checked line by line.

    mono/LANG.{train,valid}.txt[.gz]          one sentence a line, no header
    parallel/A-B.{train,dev,test}.tsv[.gz]     header `A<TAB>B[<TAB>source]`
    mono/families.json                         optional, groupings for K generators

UTF-8, LF. LANG, A and B are ISO 639-1 codes such as `sw`; A is often `en`.
"""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence

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
    """Lists the languages with text to train on, sorted; CorpusError if it has none."""
    check_folder(data_dir)
    names = (_TRAIN.fullmatch(path.name) for path in (data_dir / "mono").iterdir())
    return sorted({found[1] for found in names if found})


def mono_path(data_dir: pathlib.Path, language: str, split: str) -> pathlib.Path:
    """Finds a language's file of split train or valid; CorpusError if there is none."""
    path = data_dir / "mono" / f"{language}.{split}.txt"
    return _existing([path], f"language {language!r}")


def parallel_path(data_dir: pathlib.Path, pair: str, split: str) -> pathlib.Path:
    """Finds a file of a pair, `en-sw` or `sw-en`; CorpusError if there is none.

    `split` is train, dev or test.
    """
    first, _, second = pair.partition("-")
    names = (pair, f"{second}-{first}")
    paths = [data_dir / "parallel" / f"{name}.{split}.tsv" for name in names]
    return _existing(paths, f"the pair {pair!r}")


def _existing(paths: Sequence[pathlib.Path], wanted: str) -> pathlib.Path:
    for path in paths:
        if existing := tsv.plain_or_gzip(path):
            return existing
    raise tsv.NoCorpusError(f"{wanted} has no text: {paths[0]}[.gz] is missing")


def read_mono(path: pathlib.Path) -> Iterator[str]:
    """Yields the sentences of a monolingual file.

    CorpusError, with file and line, at an empty line, a NUL byte or bad UTF-8; and when
    the file has no line at all.
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
    """Yields the pairs of a parallel file, in the order of its columns.

    These are of `A-B` in its name. CorpusError, with file and line, at another header
    or number of fields, an empty side of a pair, a NUL byte or bad UTF-8; and when the
    file has no pair.
    """
    first, _, second = path.name.partition(".")[0].partition("-")
    columns = [first, second]
    header = tsv.header(path)
    if header not in (columns, [*columns, "source"]):
        raise CorpusError(
            f"{path}:1: header is {'<TAB>'.join(header)!r}; by the file's name it is"
            f" {'<TAB>'.join(columns)}[<TAB>source]"
        )
    for _, (one, other) in tsv.rows(path, columns):
        yield one, other


def families(data_dir: pathlib.Path, generators: int) -> list[list[str]]:
    """Reads K lists of language codes, the grouping by family of section 3.1.

    CorpusError if the folder has none for that K in `mono/families.json`.
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
