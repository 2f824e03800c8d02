"""Text of other formats, read row by row: a row's place, and the values of its columns.

    plain text [.gz]       a line is a row; of a pair, line n of one file and another
    .jsonl .ndjson [.gz]   an object a line
    .parquet               also a folder of them, as on Hugging Face's hub
    a folder of .arrow     as the library `datasets` saves one, or has it in its cache
    a dataset of TFDS      its folder, or tfds:NAME; its files need random access

All are read as a stream: none is held in memory. `text_cleaning` looks at the values.
"""

import gzip
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nebula_jax import installed
from nebula_jax.data import tsv

Row = tuple[str, Sequence[Any] | None]
"""The place of a row, such as `corpus.en:17`, and a value for each language: bytes,
str, None, or what is no text. None in place of all if the row cannot be read."""

TFDS = "tfds:"
BATCH = 1024  # rows of a Parquet file that are read at once
_JSON = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".arrow")
_UNREAD = (
    *(".json", ".csv", ".tsv", ".tmx", ".xml", ".html", ".pdf"),
    *(".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"),
)
_STATE, _DICT = "state.json", "dataset_dict.json"  # of `datasets`
_FEATURES = "features.json"  # of TFDS
_ABSENT = object()


def read(
    inputs: Sequence[str],
    languages: Sequence[str],
    columns: Sequence[str] = (),
    split: str = "train",
) -> Iterator[Row]:
    """Reads the rows of inputs, one input after the other.

    Raises CorpusError if an input is not there or of no format above, lacks a column,
    or cannot be read to its end, and if the files of a pair differ in their lines;
    MissingExtra without the library of a format.

    Args:
      inputs: files, folders, or tfds:NAME. Plain text of a pair comes in twos: a file
        of the first language, then one of the second.
      languages: one, or the two of a pair.
      columns: of formats that have any, one for each language; a dot leads into a
        column with columns of its own, as in `translation.en`. If empty they are the
        languages' codes, these within `translation`, or of one language `text`.
      split: of datasets that have several.
    """
    if columns and len(columns) != len(languages):
        raise tsv.NoCorpusError(
            f"columns={','.join(columns)}: expected one for each of"
            f" languages={','.join(languages)}"
        )
    plain = [each for each in inputs if _is_plain(each)]
    if len(languages) == 2 and plain:
        if len(plain) != len(inputs) or len(plain) % 2:
            raise tsv.NoCorpusError(
                f"input={','.join(inputs)}: plain text of a pair comes in twos, a file"
                f" of {languages[0]}, then one of {languages[1]}"
            )
        for one, other in zip(inputs[::2], inputs[1::2], strict=True):
            yield from _aligned(pathlib.Path(one), pathlib.Path(other))
        return
    for each in inputs:
        if _is_plain(each):
            yield from ((place, [line]) for place, line in _lines(pathlib.Path(each)))
        else:
            yield from _chosen(each, _records(each, split), languages, columns)


def _is_plain(name: str) -> bool:
    """Returns True for the name of a file of plain text."""
    if name.startswith(TFDS) or pathlib.Path(name).is_dir():
        return False
    last = name.removesuffix(".gz")
    if last.endswith(_JSON + _TABLES):
        return False
    if last.endswith(_UNREAD):
        raise tsv.NoCorpusError(
            f"input={name}: no format that is read here; make it text or JSON Lines"
        )
    return True


def _lines(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yields the place and the bytes of each line."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield f"{path}:{number}", line
    except FileNotFoundError:
        raise tsv.NoCorpusError(f"input={path}: there is no such file") from None
    except (EOFError, OSError, zlib.error) as error:
        raise tsv.CorpusError(
            f"{path}: cannot be read after line {number}: {error}"
        ) from None


def _aligned(one: pathlib.Path, other: pathlib.Path) -> Iterator[Row]:
    """Yields line n of both files; none of the pairs counts if one file is longer."""
    files, count = [_lines(one), _lines(other)], 0
    for count, lines in enumerate(itertools.zip_longest(*files), start=1):
        if None in lines:
            longer, shorter = (one, other) if lines[0] else (other, one)
            more = count + sum(1 for _ in files[not lines[0]])
            raise tsv.CorpusError(
                f"{longer} has {more:,} lines, {shorter} has {count - 1:,}: from where"
                " on they differ nobody can tell, so none of the pairs is taken"
            )
        yield lines[0][0], [line for _, line in lines]


def _records(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yields the place and the columns of each row; None for one that is no object."""
    path = pathlib.Path(name)
    if name.startswith(TFDS) or (path / _FEATURES).is_file():
        yield from _tfds(name, split)
        return
    if not path.exists():
        raise tsv.NoCorpusError(f"input={name}: there is no such file or folder")
    for file in _files(path, split):
        if file.name.removesuffix(".gz").endswith(_JSON):
            yield from ((place, _object(line)) for place, line in _lines(file))
        else:
            yield from _table(file)


def _files(path: pathlib.Path, split: str) -> list[pathlib.Path]:
    """Lists the files of a split of a dataset; of a file, itself."""
    if not path.is_dir():
        return [path]
    if (path / _DICT).is_file():  # of `datasets`, several splits
        known = _described(path / _DICT, "splits")
        if split not in known:
            raise _no_split(path, split, known)
        path /= split
    if (path / _STATE).is_file():  # of `datasets`, one split
        if _described(path / _STATE, "_indices_data_files", None):
            raise tsv.CorpusError(
                f"{path}: its rows are chosen by indices; save it again after"
                " flatten_indices()"
            )
        named = _described(path / _STATE, "_data_files")
        return [path / pathlib.Path(each["filename"]).name for each in named]
    every = sorted(
        each
        for each in path.rglob("*")
        if each.name.removesuffix(".gz").endswith(_JSON + _TABLES)
    )
    # As in train-00000-of-00002.parquet or train/0000.parquet.
    wanted = re.compile(rf"(?:^|[-_./]){re.escape(split)}[-_./]")
    found = [each for each in every if wanted.search(each.relative_to(path).as_posix())]
    if not found:
        raise _no_split(path, split, [each.name for each in every])
    folders = sorted({each.parent.relative_to(path).as_posix() for each in found})
    if len(folders) > 1:  # such as configurations, each of another language
        raise tsv.NoCorpusError(
            f"input={path}: split {split} is in {', '.join(folders[:20])}: name one"
        )
    return found


def _described(path: pathlib.Path, name: str, *default: Any) -> Any:
    """Returns what a description that `datasets` writes says of `name`."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return found.get(name, *default) if default else found[name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tsv.CorpusError(
            f"{path}: malformed ({type(error).__name__}: {error})"
        ) from None


def _no_split(path: pathlib.Path, split: str, known: Sequence[str]) -> tsv.CorpusError:
    there = ", ".join(known[:20]) or "no file of a dataset"
    return tsv.NoCorpusError(
        f"input={path}: it has no split {split} (from_split); there is {there}"
    )


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _table(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a Parquet or an Arrow file."""
    with installed.extra("experiments"):
        import pyarrow
        from pyarrow import parquet

    def batches() -> Iterable[Any]:
        if path.suffix == ".parquet":
            return parquet.ParquetFile(path).iter_batches(BATCH)
        try:  # `datasets` writes streams
            return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            return map(file.get_batch, range(file.num_record_batches))

    number = 0
    try:
        for batch in batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", record
    except (pyarrow.ArrowException, OSError) as error:
        words = " ".join(str(error).split())
        raise tsv.CorpusError(
            f"{path}: cannot be read after row {number}: {words}"
        ) from None


def _tfds(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a dataset of TFDS, which is prepared now if it is named."""
    with installed.extra("experiments"):
        import tensorflow_datasets as tfds

    try:
        if name.startswith(TFDS):
            builder = tfds.builder(name.removeprefix(TFDS), file_format="array_record")
            builder.download_and_prepare()
        else:
            builder = tfds.builder_from_directory(name)
        source = builder.as_data_source(split=split)
    except Exception as error:  # TFDS raises many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise tsv.NoCorpusError(
            f"input={name}: TFDS cannot read split {split} of it (from_split):"
            f" {lines[0]}"
        ) from None
    for number in range(len(source)):
        yield f"{name}:{number + 1}", source[number]


def _chosen(
    name: str,
    records: Iterator[tuple[str, Mapping[str, Any] | None]],
    languages: Sequence[str],
    columns: Sequence[str],
) -> Iterator[Row]:
    """Yields the values of columns, which the first readable row has to have."""
    wanted: Sequence[str] = ()
    for place, record in records:
        if record is None:
            yield place, None
            continue
        wanted = wanted or _columns(name, record, languages, columns)
        values = (_value(record, column) for column in wanted)
        yield place, [None if value is _ABSENT else value for value in values]


def _columns(
    name: str, record: Mapping[str, Any], languages: Sequence[str], given: Sequence[str]
) -> Sequence[str]:
    """Returns the columns of the languages' text."""
    within = [f"translation.{each}" for each in languages]
    usual = [list(languages), within, *([["text"]] if len(languages) == 1 else [])]
    for columns in [given] if given else usual:
        if all(_value(record, column) is not _ABSENT for column in columns):
            return columns
    there = ", ".join(
        f"{key}.{inner}" if isinstance(value, dict) else str(key)
        for key, value in record.items()
        for inner in (value if isinstance(value, dict) else [""])
    )
    raise tsv.NoCorpusError(
        f"input={name}: its first row has no column {', '.join(given or usual[0])};"
        f" name the columns of the text (columns), of {there}"
    )


def _value(record: Any, column: str) -> Any:
    """Returns a column's value, into which dots lead; _ABSENT if it has no such."""
    if column in record:
        return record[column]
    for part in column.split("."):
        record = record.get(part, _ABSENT) if isinstance(record, dict) else _ABSENT
    return record
