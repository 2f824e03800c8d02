"""The text behind a handle, as its owner's process reads it.

The settings of a handle lead to it (`nebula data add` writes them), and to nobody else:

    {"kind": "mono", "text_folder": PATH, "vocabulary": PATH, "max_length": L}

A text folder is `mono`, as M3's generators read it; one side of a parallel corpus is
`side`, as ABNet's source cluster reads it.

N rows, L tokens of a row, V pieces.
"""

import bisect
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax import files
from nebula_jax.data import (
    language_mixture,
    parallel_side,
    ragged_rows,
    text_folder,
    tokenizers,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.served import data_channels

SPLITS = {"mono": ("train", "valid"), "parallel": ("train",)}
"""Kind of text -> the splits of it that are served: those that a generator reads."""


class ServedText:
    """A text whose rows are numbered, the parts one after the other.

    Attributes:
      parts: of it, in the order of their rows.
      digest: of the vocabulary.
      pieces: V.
      max_length: L.
    """

    def __init__(self, digest: str, pieces: int, max_length: int, pad: int) -> None:
        """Begins without a part.

        Args:
          digest, pieces, max_length: see the class.
          pad: token id of padding.
        """
        self.digest, self.pieces, self.max_length = digest, pieces, max_length
        self.parts: list[data_channels.Part] = []
        self._pad = pad
        self._sequences: list[Sequence[Mapping[str, np.ndarray]]] = []
        self._ends: list[int] = []
        self._examples: list[ragged_rows.TokenRows] = []

    def add(
        self,
        name: str,
        split: str,
        key: str,
        rows: Sequence[Mapping[str, np.ndarray]],
        id_bytes: int = 0,
    ) -> None:
        """Adds a part; for the arguments see `data_channels.Part`.

        Raises:
          data_channels.DataError: if these are more rows than can be served.
        """
        self.parts.append(data_channels.Part(name, split, key, len(rows), id_bytes))
        self._sequences.append(rows)
        self._ends = list(itertools.accumulate(part.rows for part in self.parts))
        if len(self) > data_channels.MOST_ROWS:
            raise data_channels.DataError(
                f"{len(self)} rows; at most {data_channels.MOST_ROWS} can be served"
            )

    def add_examples(self, split: str, key: str, rows: ragged_rows.TokenRows) -> None:
        """Adds a split of a side; see `add`."""
        self._examples.append(rows)
        id_bytes = sum(len(name) + 1 for name in rows.ids)
        self.add(data_channels.SIDE, split, key, _Examples(rows), id_bytes)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, numbers: Sequence[int], capacity: int) -> np.ndarray:
        """Reads rows.

        Args:
          numbers: of them, each from 0 and less than all there are.
          capacity: N.

        Returns:
          [N, L] int32, padded; rows beyond the numbers are [PAD] throughout.
        """
        found = np.full((capacity, self.max_length), self._pad, np.int32)
        for row, number in enumerate(numbers):
            part = bisect.bisect_right(self._ends, number)
            first = self._ends[part] - self.parts[part].rows
            ids = self._sequences[part][number - first]["input_ids"]
            found[row, : len(ids)] = ids
        return found

    @functools.cached_property
    def lengths(self) -> list[np.ndarray]:
        """The tokens of each row of a side, in pages; see `data_channels`."""
        lengths = [each.lengths for each in self._examples]
        return data_channels.pages(np.concatenate([*lengths, np.zeros(0, np.int32)]))

    @functools.cached_property
    def ids(self) -> list[np.ndarray]:
        """The ids of each row of a side, a line for each, in pages."""
        lines = "".join(f"{name}\n" for each in self._examples for name in each.ids)
        return data_channels.pages(np.frombuffer(lines.encode(), np.uint8))


class _Examples(Sequence[Mapping[str, np.ndarray]]):
    """The examples of a split, as `packed_sequences` gives its sequences."""

    def __init__(self, rows: ragged_rows.TokenRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        begin, end = self._rows.offsets[number : number + 2]
        return {"input_ids": self._rows.tokens[begin:end]}


def opened(provider: Mapping[str, Any], prepared_dir: pathlib.Path) -> ServedText:
    """Opens the text behind a handle; what it takes long to make is kept.

    Args:
      provider: settings of the handle.
      prepared_dir: gets tokenized text.

    Raises:
      errors.NebulaError: if the settings do not serve, or the text.
    """
    try:
        kind, length = provider.get("kind", "mono"), int(provider["max_length"])
        folder = pathlib.Path(provider["text_folder"])
        vocabulary = pathlib.Path(provider["vocabulary"])
    except (KeyError, TypeError, ValueError):
        raise data_channels.DataError(
            "the handle's settings lack text_folder, vocabulary or max_length:"
            " register it with `nebula data add`"
        ) from None
    if kind == "mono":
        return _text_folder(folder, vocabulary, length, prepared_dir)
    if kind == "side":
        return _side(folder, vocabulary, length, prepared_dir)
    raise data_channels.DataError(f"data of kind {kind!r} cannot be served")


def _text_folder(
    folder: pathlib.Path, path: pathlib.Path, length: int, prepared_dir: pathlib.Path
) -> ServedText:
    vocabulary = vocabularies.load(path)
    made = ServedText(
        *(vocabulary.digest, vocabulary.size, length, vocabularies.SPECIAL.pad)
    )
    for kind, language in _texts(folder):
        prepared = language_mixture.prepare(
            folder, kind, language, SPLITS[kind], vocabulary, length, prepared_dir
        )
        for split, sequences in prepared.splits.items():
            made.add(f"{kind}/{language}", split, prepared.key, sequences)
    return made


def _texts(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Returns kind and language of each text in a folder, in order."""
    text_folder.check_folder(folder)

    def languages(pattern: str) -> list[str]:
        names = {path.name.partition(".")[0] for path in folder.glob(pattern)}
        return sorted(names)

    mono = languages("mono/*.train.txt*")
    pairs = languages("parallel/en-*.train.tsv*")
    return [("mono", each) for each in mono] + [
        ("parallel", each.removeprefix("en-")) for each in pairs
    ]


def _side(
    folder: pathlib.Path, path: pathlib.Path, length: int, prepared_dir: pathlib.Path
) -> ServedText:
    tokenizer = tokenizers.load(path)
    special = tokenizer.special
    made = ServedText(tokenizer.digest, tokenizer.size, length, special.pad)
    for split in parallel_side.splits(folder):
        file = parallel_side.path(folder, split)
        rows = ragged_rows.prepare(
            file,
            tokenizer,
            tokenizer.digest,
            length,
            unknown=special.unk,
            before=(special.cls,),
            after=(special.sep,),
            truncate=split != "train",  # as a cluster that reads its own side does
            prepared_dir=prepared_dir,
        )
        key = files.digest_of([tokenizer.digest, files.digest(file), length])
        made.add_examples(split, key, rows)
    return made
