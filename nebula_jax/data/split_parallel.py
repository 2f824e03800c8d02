"""Splits the parallel text of a text folder into two sides, one language each.

OUT/source/  OUT/target/    sides (see `parallel_side`)
OUT/split.json              what they were made from
"""

import collections
import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import files
from nebula_jax.data import django_messages, parallel_side, text_folder, tsv

FLORES = "flores"  # the split that is made of a text folder's FLORES file
HELD_OUT = "held_out"  # the split of training pairs that are not trained on
DJANGO = "package:django"  # names Django's messages in the place of a text folder

_MANIFEST = "split.json"
_FORMAT = 1  # of what `split` writes; part of the manifest


class _Pair(NamedTuple):
    id: str
    source: str
    target: str


def split(
    data_dir: pathlib.Path | str,
    languages: tuple[str, str],
    out: pathlib.Path,
    sources: Sequence[str] | None = None,
    max_pairs: int | None = None,
    max_words: int | None = None,
    held_out: int = 0,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes and returns the folders of two sides, neither with text of the other.

    The id of a pair is its split and its number in the file it comes from:
    `train-000001` is the first pair of the training file, whatever is left out. Where
    the text folder has no test file, every other pair of dev is for the test. Its
    FLORES file, if it has one, becomes the split `flores`. Raises CorpusError at
    missing or malformed text, at values of `sources` that no pair has, at fewer pairs
    than `held_out` and `max_pairs` need, and if `out` holds anything else.

    Args:
      data_dir: a text folder (see `text_folder`), or `package:django`.
      languages: (source, target).
      out: gets `source/`, `target/` and the manifest; written whole or not at all. If
        it is there already and was made alike, nothing is done.
      sources: values of the column `source` of training pairs to take; None for all.
        dev and test, which are in-domain, are always taken whole.
      max_pairs: at most so many training pairs, chosen by a hash of their ids: a larger
        number chooses these and others.
      max_words: at most so many words, between spaces, on both sides, of dev and test
        too; then FLORES, whose sentences are long, is left out. A text without spaces,
        such as Chinese, is one word, so that the English side alone counts.
      held_out: so many training pairs that may be taken become the split `held_out`
        instead, the same ones whatever `max_pairs` is: the last by the same hash, so
        that the first are trained on. No other training pair has the same text on
        either side, letters' case and punctuation aside.
    """
    manifest = {
        "format": _FORMAT,
        "languages": list(languages),
        "sources": sorted(sources) if sources else None,
        "max_pairs": max_pairs,
        "max_words": max_words,
        "made_from": _made_from(data_dir, languages),
    }
    if held_out:  # else it is the manifest of folders made before there were any
        manifest["held_out"] = held_out
    if not _is_made(out, manifest):
        with _text_folder(data_dir) as folder:
            paths = _paths(folder, languages)
            if max_words is not None:  # of FLORES hardly a sentence would be left
                paths.pop(FLORES, None)
            pairs = _pairs(paths, languages, sources, max_pairs, max_words, held_out)
            _write(out, manifest, pairs)
    return out / "source", out / "target"


def pairs_to_test(
    data_dir: pathlib.Path | str,
    languages: tuple[str, str],
    max_words: int | None = None,
) -> dict[str, list[tuple[str, str]]]:
    """Reads the pairs that a model is tested on, as `split` would give them.

    Of a text folder, which may lack training text, or of `package:django`. Returns the
    pairs of dev, test and flores, as far as there are any; raises CorpusError at
    malformed text, or if there are none.
    """
    with _text_folder(data_dir) as folder:
        paths = _paths(folder, languages, needed=())
        paths.pop("train", None)
        if max_words is not None:
            paths.pop(FLORES, None)
        if not paths:  # names what is missing
            text_folder.parallel_path(folder, "-".join(languages), "test")
        found = {split: _read(path, languages, split) for split, path in paths.items()}
    found = _short(found, max_words)
    found |= _halves(found)
    return {
        split: [(pair.source, pair.target) for pair in pairs]
        for split, pairs in found.items()
        if pairs
    }


def _made_from(data_dir: pathlib.Path | str, languages: tuple[str, str]) -> list:
    """Returns JSON values that differ from those of any other text."""
    if str(data_dir) != DJANGO:
        paths = _paths(pathlib.Path(data_dir), languages).values()
        return [[path.name, files.digest(path)] for path in paths]
    try:
        return [DJANGO, importlib.metadata.version("django")]
    except importlib.metadata.PackageNotFoundError:
        return [DJANGO, None]  # the error of `django_messages` explains how to get it


@contextlib.contextmanager
def _text_folder(data_dir: pathlib.Path | str) -> Iterator[pathlib.Path]:
    """Yields `data_dir`, or a temporary folder with Django's messages."""
    if str(data_dir) != DJANGO:
        yield pathlib.Path(data_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        django_messages.write_text_folder(pathlib.Path(folder))
        yield pathlib.Path(folder)


def _paths(
    data_dir: pathlib.Path,
    languages: tuple[str, str],
    needed: Sequence[str] = ("train", "dev"),
) -> dict[str, pathlib.Path]:
    """Maps splits to files of pairs; raises CorpusError if a needed one lacks."""
    pair = "-".join(languages)
    if languages[0] == languages[1]:
        raise tsv.CorpusError(f"languages {pair}: expected two that differ")
    paths = {}
    for split in parallel_side.SPLITS:
        try:
            paths[split] = text_folder.parallel_path(data_dir, pair, split)
        except tsv.NoCorpusError:
            if split in needed:
                raise
    flores = tsv.plain_or_gzip(data_dir / "parallel" / "flores200-devtest.15way.tsv")
    if flores is not None and {*languages} <= {*tsv.header(flores)}:
        paths[FLORES] = flores
    return paths


def _pairs(
    paths: Mapping[str, pathlib.Path],
    languages: tuple[str, str],
    sources: Sequence[str] | None,
    max_pairs: int | None,
    max_words: int | None,
    held_out: int,
) -> dict[str, list[_Pair]]:
    """Reads and selects the pairs of each split."""
    pairs = {split: _read(path, languages, split) for split, path in paths.items()}
    if sources:
        pairs["train"] = _from_sources(paths["train"], pairs["train"], sources)
    pairs = _short(pairs, max_words)
    if held_out:
        pairs |= _hold_out(paths["train"], pairs["train"], held_out, max_pairs)
    if max_pairs is not None:
        pairs["train"] = sorted(_by_hash(pairs["train"])[:max_pairs])
    pairs |= _halves(pairs)
    for split, of_split in pairs.items():
        if not of_split:
            raise tsv.CorpusError(f"{paths['train'].parent}: no pair for {split}")
    return pairs


def _read(path: pathlib.Path, languages: tuple[str, str], split: str) -> list[_Pair]:
    rows = tsv.rows(path, languages, forbidden=tsv.CONTROL)
    # Line 1 is the header, so that pair n is in line n + 1.
    return [_Pair(f"{split}-{line - 1:06d}", *texts) for line, texts in rows]


def _from_sources(
    path: pathlib.Path, pairs: Sequence[_Pair], sources: Sequence[str]
) -> list[_Pair]:
    """Selects the pairs whose column `source` is one of `sources`."""
    tags = [tag for _, (tag,) in tsv.rows(path, ("source",), forbidden=tsv.CONTROL)]
    unknown = sorted(set(sources) - set(tags))
    if unknown:
        raise tsv.CorpusError(
            f"{path}: no pair has the source {', '.join(unknown)};"
            f" there are {', '.join(sorted(set(tags)))}"
        )
    return [pair for pair, tag in zip(pairs, tags, strict=True) if tag in sources]


def _hold_out(
    path: pathlib.Path, pairs: Sequence[_Pair], count: int, max_pairs: int | None
) -> dict[str, list[_Pair]]:
    """Takes `count` pairs out of training, those whose texts occur once alone."""
    seen = [
        collections.Counter(letters(getattr(pair, side)) for pair in pairs)
        for side in ("source", "target")
    ]
    alone = [
        pair
        for pair in _by_hash(pairs)
        if seen[0][letters(pair.source)] == seen[1][letters(pair.target)] == 1
    ]
    if count > len(alone):
        raise tsv.CorpusError(
            f"{path}: {count} pairs are to be held out; of {len(pairs)} training pairs"
            f" that fit, {len(alone)} have texts that no other has"
        )
    left = len(pairs) - count
    if left < (max_pairs or 1):
        raise tsv.CorpusError(
            f"{path}: of {len(pairs)} training pairs that fit, {count} are to be held"
            f" out; {left} are left, not {max_pairs or 1}"
        )
    chosen = set(alone[-count:])
    return {
        "train": [pair for pair in pairs if pair not in chosen],
        HELD_OUT: [
            pair._replace(id=pair.id.replace("train", HELD_OUT, 1))
            for pair in sorted(chosen)
        ],
    }


def letters(text: str) -> str:
    """Returns a text without case, spaces and punctuation; itself if that is all."""
    return "".join(re.findall(r"\w+", text.casefold())) or text


def _by_hash(pairs: Iterable[_Pair]) -> list[_Pair]:
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())


def _halves(pairs: Mapping[str, list[_Pair]]) -> dict[str, list[_Pair]]:
    """Returns dev and test, made of dev, where there are no test pairs; else {}."""
    if "test" in pairs or "dev" not in pairs:
        return {}
    dev = pairs["dev"]
    test = [pair._replace(id=pair.id.replace("dev", "test", 1)) for pair in dev[1::2]]
    return {"dev": dev[0::2], "test": test}


def _short(
    pairs: Mapping[str, list[_Pair]], max_words: int | None
) -> dict[str, list[_Pair]]:
    """Returns the pairs of each split whose sentences are short; all if it is None."""

    def is_short(pair: _Pair) -> bool:
        words = max(len(text.split()) for text in (pair.source, pair.target))
        return max_words is None or words <= max_words

    return {split: list(filter(is_short, each)) for split, each in pairs.items()}


def _is_made(out: pathlib.Path, manifest: Mapping[str, Any]) -> bool:
    """Returns whether `out` was made with this manifest, and perhaps edited since."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / _MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        raise tsv.CorpusError(
            f"{out} is there and no split of a parallel corpus; name another folder"
        ) from None
    if found != manifest:
        raise tsv.CorpusError(
            f"{out} holds another split (see its {_MANIFEST}); remove it or name"
            " another folder"
        )
    for side in ("source", "target"):
        if not (out / side).is_dir():
            raise tsv.CorpusError(f"{out}: {side} is gone; remove {out} to split anew")
    return True


def _write(
    out: pathlib.Path, manifest: Mapping[str, Any], pairs: Mapping[str, Sequence[_Pair]]
) -> None:
    try:
        with files.writing(out) as partial:
            for side in ("source", "target"):
                (partial / side).mkdir(parents=True)
                for split, of_split in pairs.items():
                    rows = ((pair.id, getattr(pair, side)) for pair in of_split)
                    _write_side(partial / side / f"{split}.tsv.gz", rows)
            text = json.dumps(manifest, indent=1) + "\n"
            (partial / _MANIFEST).write_text(text, "utf-8")
    except OSError:
        if not _is_made(out, manifest):  # else another process was first
            raise


def _write_side(path: pathlib.Path, rows: Iterable[tuple[str, str]]) -> None:
    lines = [parallel_side.HEADER, *rows]
    text = "".join(f"{name}\t{text}\n" for name, text in lines)
    # No name and no time in the archive: the same text is the same bytes.
    path.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
