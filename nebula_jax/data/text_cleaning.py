"""Rows of any text, made into files of a text folder; what is dropped is counted.

A text is brought into Unicode's NFC, its white space into single spaces. A row is
dropped for one of REASONS. What is held out is chosen by a hash of its text, and no
line of its language that any file of the folder trains on, mono or parallel, equals it,
but for case and punctuation. Where too few rows are left by that, others are taken
which another file trains on, and counted.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import heapq
import json
import pathlib
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from nebula_jax import files
from nebula_jax.data import split_parallel, text_folder, tsv

EMPTY, UNDECODABLE, NO_TEXT = "empty", "undecodable", "no text"
LONG, MISALIGNED = "too long", "misaligned"
DUPLICATE, HELD_OUT = "duplicated", "held out"
REASONS = {
    EMPTY: "nothing but white space",
    UNDECODABLE: "not UTF-8, control characters, or a row that is no JSON object",
    NO_TEXT: "a number, or another value that is no text",
    LONG: "more characters than may be",
    MISALIGNED: "one side is empty, or many times as long as the other",
    DUPLICATE: "the same row came before",
    HELD_OUT: "but for case and punctuation, a text that another split has",
}
"""Why a row is dropped -> what that means."""

SPLITS = {1: ("train", "valid"), 2: ("train", "dev", "test")}
"""Languages of a row -> the splits of their text."""
PLACES = 3  # of the first rows that were dropped for a reason
LEAST_SHARE = 10  # a split that is held out has a tenth of the rows at most
LAST = 2**64  # above any hash


class Limits(NamedTuple):
    """The limits of a row that is kept."""

    characters: int = 2000
    ratio: float = 9.0  # largest of a pair's lengths in characters (Moses': in words)


LIMITS = Limits()


class Chosen(NamedTuple):
    """A row that is held out."""

    number: int  # its hash, and LAST if another file trains on one of its texts
    keys: tuple[int, ...]  # those of its texts


@dataclasses.dataclass
class Report:
    """The rows of one import: how many there were, where they are, what was dropped."""

    read: int = 0
    kept: dict[str, int] = dataclasses.field(default_factory=dict)  # file -> its rows
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)  # rows by reason
    # Reason -> the first rows' places.
    places: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    overlap: int = 0  # rows held out, though another file trains on one of their texts

    def drop(self, reason: str, place: str) -> None:
        """Counts a row that is dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.places.setdefault(reason, []).append(place)
        del self.places[reason][PLACES:]

    def lines(self) -> list[str]:
        """Returns the report in words, a line for each file and for each reason."""
        found = [f"{name}: {count:,} rows" for name, count in self.kept.items()]
        found.append(f"{self.read:,} rows read, {sum(self.dropped.values()):,} dropped")
        for reason, meaning in REASONS.items():
            if count := self.dropped.get(reason):
                first = ", ".join(self.places[reason])
                found.append(f"  {count:,} {reason} ({meaning}), first {first}")
        if self.overlap:
            found.append(
                f"{self.overlap:,} rows that are held out have a text that another file"
                " of the folder trains on: there were too few without"
            )
        return found


def cleaned(values: Sequence[Any] | None, limits: Limits) -> tuple[list[str], str]:
    """Returns the texts of a row, and why it is dropped; "" if it is kept.

    >>> cleaned([b"one\\tline\\r\\n"], Limits())
    (['one line'], '')
    >>> cleaned(["yes", ""], Limits())
    (['yes', ''], 'misaligned')
    """
    texts: list[str] = []
    for value in [b"\xff"] if values is None else values:
        try:
            text = value.decode() if isinstance(value, bytes) else value
            text = "" if text is None else text
            if not isinstance(text, str):
                return texts, NO_TEXT
            text.encode()  # JSON may have half of a surrogate pair
        except UnicodeError:
            return texts, UNDECODABLE
        # A byte-order mark where files were joined is no text: see `tsv`.
        text = unicodedata.normalize("NFC", text.lstrip("\ufeff"))
        texts.append(" ".join(text.split()))
        if tsv.CONTROL.search(texts[-1]):
            return texts, UNDECODABLE
    lengths = list(map(len, texts))
    if not any(lengths):
        return texts, EMPTY
    if not all(lengths):
        return texts, MISALIGNED
    if max(lengths) > limits.characters:
        return texts, LONG
    return texts, MISALIGNED if max(lengths) > limits.ratio * min(lengths) else ""


def write(
    rows: Iterable[tuple[str, Sequence[Any] | None]],
    out: pathlib.Path,
    languages: Sequence[str],
    *,
    split: str = "train",
    held_out: int = 500,
    limits: Limits = LIMITS,
) -> Report:
    """Writes rows as one language's, or one pair's, part of a text folder.

    Each row that is kept, or is there already, takes a hundred bytes of memory. Raises
    CorpusError if the split is there already, or too few rows are left.

    Args:
      rows: from `text_import.read`.
      out: the text folder, which may have other languages and splits already.
      languages: one, or the two of a pair, in the order of the rows' values.
      split: of SPLITS. With `train`, splits that `out` lacks are taken out of the rows.
      held_out: rows of each of those, but at most a tenth; 0 for none.
    """
    if languages[-1] == "en" != languages[0]:  # as in the names of most text folders
        rows = ((place, values and values[::-1]) for place, values in rows)
        languages = languages[::-1]
    there = {each: _find(out, languages, each) for each in SPLITS[len(languages)]}
    if there[split] is not None:
        raise tsv.CorpusError(
            f"{there[split]} is there already; move it away, or import all of its text"
            " at once (input takes several)"
        )
    lacking = [each for each, path in there.items() if path is None and each != split]
    held_out = held_out if split == "train" else 0
    known = {key for path in there.values() if path for key in _keys_of(path)}
    trained, tested = _elsewhere(out, languages)
    known |= tested if split == "train" else trained
    report, most = Report(), held_out * len(lacking)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out) as kept:
        passed = _passed(rows, languages, limits, known, report)
        count, smallest = _store(passed, languages, most, trained, kept)
        each = min(held_out, count // LEAST_SHARE)
        if not count or (most and not each):
            few = f"{count} rows are left, too few to hold any out (held_out)"
            raise tsv.CorpusError("\n  ".join([few, *report.lines()]))
        chosen, place_of = dict[Chosen, str](), dict[int, str]()
        for place, row in enumerate(smallest[: each * len(lacking)]):
            # One that shares a text with another goes beside it; with some of two
            # splits, nowhere.
            beside = {place_of[key] for key in row.keys if key in place_of}
            if len(beside) < 2:
                chosen[row] = beside.pop() if beside else lacking[place % len(lacking)]
                place_of |= dict.fromkeys(row.keys, chosen[row])
        _write(kept, out, languages, split, chosen, report)
    name = "-".join(languages)
    with files.writing(out / "imports" / f"{name}.{split}.json") as partial:
        text = json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False)
        partial.write_text(text + "\n", "utf-8")
    return report


def _find(
    out: pathlib.Path, languages: Sequence[str], split: str
) -> pathlib.Path | None:
    """Returns the file of a split; None if there is none."""
    find = text_folder.mono_path if len(languages) == 1 else text_folder.parallel_path
    with contextlib.suppress(tsv.NoCorpusError):
        return find(out, "-".join(languages), split)
    return None


def _elsewhere(
    out: pathlib.Path, languages: Sequence[str]
) -> tuple[set[int], set[int]]:
    """Returns keys of these languages' texts in other files: trained on, held out."""
    found: tuple[set[int], set[int]] = set(), set()
    for path in sorted([*out.glob("mono/*.txt*"), *out.glob("parallel/*.tsv*")]):
        name, split, *_ = path.name.split(".")
        of_file = [name] if path.parent.name == "mono" else name.split("-", 1)
        is_shared = not {*of_file}.isdisjoint(languages)
        if is_shared and split in SPLITS[len(of_file)]:
            found[split != "train"].update(_keys_of(path))
    return found


def _hash(*texts: str) -> int:
    data = "\t".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _keys(languages: Sequence[str], texts: Sequence[str]) -> list[int]:
    """Returns a key of each text of a row, the same if its letters are."""
    return [
        _hash(language, split_parallel.letters(text))
        for language, text in zip(languages, texts, strict=True)
    ]


def _keys_of(path: pathlib.Path) -> Iterator[int]:
    """Yields the keys of all texts of a file of a text folder."""
    name = path.name.partition(".")[0]
    if path.parent.name == "mono":
        for text in text_folder.read_mono(path):
            yield from _keys([name], [text])
    else:
        languages = name.split("-", 1)
        for _, texts in tsv.rows(path, languages):
            yield from _keys(languages, texts)


def _passed(
    rows: Iterable[tuple[str, Sequence[Any] | None]],
    languages: Sequence[str],
    limits: Limits,
    known: set[int],
    report: Report,
) -> Iterator[tuple[str, list[str]]]:
    """Yields place and texts of rows that are not dropped; counts all."""
    seen: set[int] = set()
    for place, values in rows:
        report.read += 1
        texts, reason = cleaned(values, limits)
        if not reason and _hash(*texts) in seen:
            reason = DUPLICATE
        elif not reason and known and not known.isdisjoint(_keys(languages, texts)):
            reason = HELD_OUT
        if reason:
            report.drop(reason, place)
        else:
            seen.add(_hash(*texts))
            yield place, texts


def _store(
    rows: Iterable[tuple[str, list[str]]],
    languages: Sequence[str],
    most: int,
    trained: set[int],
    kept: IO[bytes],
) -> tuple[int, list[Chosen]]:
    """Writes rows to a file, place first; returns their number and the `most` smallest.

    These by their hashes; rows with a text that other files train on come last.
    """
    count, heap = 0, list[tuple[int, tuple[int, ...]]]()
    for place, texts in rows:
        count += 1
        kept.write("\t".join([" ".join(place.split()), *texts]).encode() + b"\n")
        number = -_hash(*texts)  # so that the largest hash is in front
        if len(heap) < most or (most and number > heap[0][0]):
            keys = tuple(_keys(languages, texts))
            number -= 0 if trained.isdisjoint(keys) else LAST
            heapq.heappush(heap, (number, keys))
            if len(heap) > most:
                heapq.heappop(heap)
    return count, [Chosen(-number, keys) for number, keys in sorted(heap)[::-1]]


def _write(
    kept: IO[bytes],
    out: pathlib.Path,
    languages: Sequence[str],
    split: str,
    chosen: Mapping[Chosen, str],
    report: Report,
) -> None:
    """Writes the files of a split and of what is held out of it."""
    kind, name = ("mono", "txt") if len(languages) == 1 else ("parallel", "tsv")
    split_of = {row.number % LAST: where for row, where in chosen.items()}
    report.overlap = sum(row.number >= LAST for row in chosen)
    held_out = {key for row in chosen for key in row.keys}
    with contextlib.ExitStack() as stack:
        streams: dict[str, gzip.GzipFile] = {}
        for each in dict.fromkeys([split, *chosen.values()]):
            path = out / kind / f"{'-'.join(languages)}.{each}.{name}.gz"
            partial = stack.enter_context(files.writing(path))
            raw = stack.enter_context(partial.open("wb"))
            # No name and no time in the archive: the same text is the same bytes.
            streams[each] = stack.enter_context(gzip.GzipFile("", "wb", 6, raw, 0))
            report.kept[str(path)] = 0
            if kind == "parallel":
                streams[each].write("\t".join(languages).encode() + b"\n")
        counts = dict.fromkeys(streams, 0)
        kept.seek(0)
        for line in kept:
            place, *texts = line.decode().removesuffix("\n").split("\t")
            where = split_of.get(_hash(*texts), split)
            if where == split and not held_out.isdisjoint(_keys(languages, texts)):
                report.drop(HELD_OUT, place)
                continue
            streams[where].write("\t".join(texts).encode() + b"\n")
            counts[where] += 1
        report.kept = dict(zip(report.kept, counts.values(), strict=True))
        if not all(counts.values()):  # nothing is written
            few = "every row has a text of one that is held out"
            raise tsv.CorpusError("\n  ".join([few, *report.lines()]))
