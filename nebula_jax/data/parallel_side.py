"""One side of a parallel corpus: all the text that a cluster of translation holds.

The source cluster has only X and the target cluster only Y (section 3.2). Each has a
folder, and the ids are all that the two folders have in common:

    FOLDER/train.tsv[.gz]  dev.tsv[.gz]  test.tsv[.gz]     header `id<TAB>text`
    FOLDER/NAME.tsv[.gz]                                   any further test set

UTF-8, LF, an example a line, no id twice in a file. Examples are taken in the order of
their ids, not of their lines, so that both sides count them alike.

An error may be told to the peer: none of those raised here quotes text.
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nebula_jax.data import django_messages, text_folder

SPLITS = ("train", "dev", "test")
"""What every side has."""
FLORES = "flores"
DJANGO = "package:django"

_HEADER = ("id", "text")
_ID = re.compile(r"[!-~]{1,100}")  # it stands in messages, as a cluster's name does
# Unicode's controls and its two line separators; a tab cannot be in a field.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MANIFEST = "split.json"
_FORMAT = 1  # of what split_parallel writes; part of the manifest


class Side(NamedTuple):
    """The examples of one split, sorted by id; `texts[n]` belongs to `ids[n]`."""

    ids: list[str]
    texts: list[str]


def path(folder: pathlib.Path, split: str) -> pathlib.Path:
    """The file of a split.

    Raises:
      corpora.CorpusError: if there is none.
    """
    for ending in (".tsv", ".tsv.gz"):
        candidate = folder / f"{split}{ending}"
        if candidate.is_file():
            return candidate
    raise text_folder.CorpusError(
        f"{folder}: {split}.tsv.gz is missing; a side of a parallel corpus is a folder"
        f" with {', '.join(SPLITS)}, .tsv or .tsv.gz"
    )


def splits(folder: pathlib.Path) -> tuple[str, ...]:
    """The splits of a side: `SPLITS`, then its further test sets by name.

    Raises:
      corpora.CorpusError: if one of `SPLITS` is missing.
    """
    for split in SPLITS:
        path(folder, split)
    files = [*folder.glob("*.tsv"), *folder.glob("*.tsv.gz")]
    names = {each.name.partition(".tsv")[0] for each in files}
    return (*SPLITS, *sorted(names - set(SPLITS)))


def read(file: pathlib.Path) -> Side:
    """Reads and checks one split.

    Raises:
      corpora.CorpusError: with file and line, at another header, another number of
        fields, an empty text, a control character, bad UTF-8, an id that is no id or
        comes twice; and when the file has no example.
    """
    lines: dict[str, int] = {}
    examples = []
    for number, (name, text) in _columns(file, _HEADER, exactly=True):
        if not _ID.fullmatch(name):
            raise text_folder.CorpusError(
                f"{file}:{number}: an id is 1 to 100 printable ASCII characters"
                " without spaces"
            )
        if name in lines:
            raise text_folder.CorpusError(
                f"{file}:{number}: id {name!r} is in line {lines[name]} already"
            )
        lines[name] = number
        examples.append((name, text))
    if not examples:
        raise text_folder.CorpusError(f"{file}: has no examples")
    ids, texts = zip(*sorted(examples), strict=True)
    return Side(list(ids), list(texts))


def split_parallel(
    data_dir: pathlib.Path | str,
    languages: tuple[str, str],
    out: pathlib.Path,
    sources: Sequence[str] | None = None,
    max_pairs: int | None = None,
    max_words: int | None = None,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes two sides, which know nothing of each other's text, of a text folder.

    The id of a pair is its split and its number in the file it comes from:
    `train-000001` is the first pair of the training file, whatever is left out. Where
    the text folder has no test file, every other pair of dev is for the test. Its
    FLORES file, if it has one, becomes the split `flores`.

    Args:
      data_dir: a text folder (see `corpora`), or `package:django`.
      languages: (source, target), one of them `en`.
      out: gets `source/`, `target/` and how they were made; written whole or not at
        all. If it is there already and was made alike, nothing is done.
      sources: what the column `source` of a training pair may say; None for anything.
        dev and test, which are in-domain, are always taken whole.
      max_pairs: at most so many training pairs, chosen by a hash of their ids: a larger
        number chooses these and others.
      max_words: at most so many words, between spaces, on both sides; of dev and test
        too. FLORES, whose sentences are long, is left out then.

    Returns:
      The folders of source and target.

    Raises:
      corpora.CorpusError: at missing or malformed text, at values of `sources` that no
        pair has, and if `out` holds anything else.
    """
    manifest = {
        "format": _FORMAT,
        "languages": list(languages),
        "sources": sorted(sources) if sources else None,
        "max_pairs": max_pairs,
        "made_from": _made_from(data_dir, languages),
    }
    if max_words is not None:
        manifest["max_words"] = max_words
    if not _is_made(out, manifest):
        with _text_folder(data_dir) as folder:
            files = _files(folder, languages)
            if max_words is not None:
                files.pop(FLORES, None)
            pairs = _pairs(files, languages, sources, max_pairs, max_words)
            _write_whole(out, manifest, pairs)
    return out / "source", out / "target"


class _Pair(NamedTuple):
    id: str
    source: str
    target: str


def _made_from(data_dir: pathlib.Path | str, languages: tuple[str, str]) -> list:
    """What tells this text from any other, as JSON values."""
    if str(data_dir) != DJANGO:
        files = _files(pathlib.Path(data_dir), languages).values()
        return [[file.name, text_folder.digest(file)] for file in files]
    try:
        return [DJANGO, importlib.metadata.version("django")]
    except importlib.metadata.PackageNotFoundError:
        return [DJANGO, None]  # `django_messages` says how to get it


@contextlib.contextmanager
def _text_folder(data_dir: pathlib.Path | str) -> Iterator[pathlib.Path]:
    """`data_dir`, or Django's messages in a folder that is removed again."""
    if str(data_dir) != DJANGO:
        yield pathlib.Path(data_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        django_messages.write_text_folder(pathlib.Path(folder))
        yield pathlib.Path(folder)


def _files(
    data_dir: pathlib.Path, languages: tuple[str, str]
) -> dict[str, pathlib.Path]:
    """Split -> file of pairs, without those that the text folder may lack."""
    foreign = [language for language in languages if language != "en"]
    if len(foreign) != 1:
        raise text_folder.CorpusError(
            f"languages {'-'.join(languages)}: one side has to be en, and one not"
        )
    files = {
        split: text_folder.parallel_path(data_dir, foreign[0], split)
        for split in ("train", "dev")
    }
    with contextlib.suppress(text_folder.CorpusError):  # none: dev is halved
        files["test"] = text_folder.parallel_path(data_dir, foreign[0], "test")
    for ending in (".tsv", ".tsv.gz"):
        flores = data_dir / "parallel" / f"flores200-devtest.15way{ending}"
        if flores.is_file():
            files[FLORES] = flores
    return files


def _pairs(files, languages, sources, max_pairs, max_words) -> dict[str, list[_Pair]]:
    pairs = {split: _numbered(file, languages, split) for split, file in files.items()}
    if sources:
        tags = [tag for _, (tag,) in _columns(files["train"], ("source",))]
        unknown = sorted(set(sources) - set(tags))
        if unknown:
            raise text_folder.CorpusError(
                f"{files['train']}: no pair has the source {', '.join(unknown)};"
                f" there are {', '.join(sorted(set(tags)))}"
            )
        pairs["train"] = [
            pair
            for pair, tag in zip(pairs["train"], tags, strict=True)
            if tag in sources
        ]
    if max_words is not None:
        for split, those in pairs.items():
            pairs[split] = [pair for pair in those if _is_short(pair, max_words)]
    if max_pairs is not None:
        chosen = sorted(pairs["train"], key=lambda pair: _hash(pair.id))[:max_pairs]
        pairs["train"] = sorted(chosen)
    if "test" not in pairs:
        held_back = pairs["dev"]
        pairs["dev"] = held_back[0::2]
        pairs["test"] = [
            pair._replace(id=pair.id.replace("dev", "test", 1))
            for pair in held_back[1::2]
        ]
    for split, those in pairs.items():
        if not those:
            raise text_folder.CorpusError(
                f"{files['train'].parent}: no pair for {split}"
            )
    return pairs


def _is_short(pair: _Pair, max_words: int) -> bool:
    return all(len(text.split()) <= max_words for text in (pair.source, pair.target))


def _numbered(file: pathlib.Path, languages, split: str) -> list[_Pair]:
    rows = _columns(file, languages)
    # Line 1 is the header, so that pair n is in line n + 1.
    return [_Pair(f"{split}-{line - 1:06d}", *texts) for line, texts in rows]


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_made(out: pathlib.Path, manifest: dict) -> bool:
    """Whether `out` is there and was made alike. Raises CorpusError at anything else.

    What is in the two folders is not looked at: a person may have edited it.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        there = json.loads((out / _MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        raise text_folder.CorpusError(
            f"{out} is there and no split of a parallel corpus; name another folder"
        ) from None
    if there != manifest:
        raise text_folder.CorpusError(
            f"{out} holds another split ({_MANIFEST} says which);"
            " remove it or name another folder"
        )
    for side in ("source", "target"):
        if not (out / side).is_dir():
            raise text_folder.CorpusError(
                f"{out}: {side} is gone; remove {out} to split anew"
            )
    return True


def _write_whole(out: pathlib.Path, manifest: dict, pairs) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for side in ("source", "target"):
            (partial / side).mkdir()
            for split, those in pairs.items():
                rows = ((pair.id, getattr(pair, side)) for pair in those)
                _write(partial / side / f"{split}.tsv.gz", rows)
        text = json.dumps(manifest, indent=1) + "\n"
        (partial / _MANIFEST).write_text(text, "utf-8")
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        try:
            os.rename(partial, out)
        except OSError:
            if not _is_made(out, manifest):  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: pathlib.Path, rows: Iterable[tuple[str, str]]) -> None:
    lines = "".join(f"{name}\t{text}\n" for name, text in [_HEADER, *rows])
    # No name and no time in the archive: the same text is the same bytes.
    file.write_bytes(gzip.compress(lines.encode(), compresslevel=6, mtime=0))


def _columns(
    file: pathlib.Path, names: Sequence[str], exactly: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, the named fields) of a file with tabs and a header.

    Args:
      file: plain, or gzip if its name says so.
      names: columns wanted.
      exactly: whether other columns are an error. (A side must not hold the other's
        text.)
    """
    lines = _lines(file)
    _, header = next(lines, (1, ""))
    columns = header.split("\t")
    expected = f"expected {'<TAB>'.join(names)}" + (", nothing else" if exactly else "")
    for name in names:
        if name not in columns:
            raise text_folder.CorpusError(
                f"{file}:1: the header has no column {name!r}; {expected}"
            )
    if exactly and columns != list(names):
        raise text_folder.CorpusError(
            f"{file}:1: the header has {len(columns)} columns; {expected}"
        )
    places = [columns.index(name) for name in names]
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise text_folder.CorpusError(
                f"{file}:{number}: {len(fields)} tab-separated fields;"
                f" expected {len(columns)}"
            )
        for name, place in zip(names, places, strict=True):
            if not fields[place].strip():
                raise text_folder.CorpusError(f"{file}:{number}: {name} is empty")
            found = _CONTROL.search(fields[place])
            if found:
                raise text_folder.CorpusError(
                    f"{file}:{number}: control character U+{ord(found[0]):04X}"
                    f" in {name}"
                )
        yield number, [fields[place] for place in places]


def _lines(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    """As `corpora`'s, but a lone CR is left for the check of control characters."""
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opener(file, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                yield number, raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise text_folder.CorpusError(
            f"{file}:{number}: not UTF-8 ({error.reason})"
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        raise text_folder.CorpusError(
            f"{file}: cannot be read after line {number}: {error}"
        ) from None
