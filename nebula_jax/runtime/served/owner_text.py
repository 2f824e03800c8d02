"""The text behind a handle, as its owner's process reads it.

The settings of a handle lead to it (`nebula data add` writes them), and to nobody else:

    {"text_folder": PATH, "vocabulary": PATH, "max_length": L}

The text folder is one as M3's generators read it.

N rows, L tokens of a row, V pieces.
"""

import bisect
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax.data import language_mixture, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.served import data_channels

SPLITS = {"mono": ("train", "valid"), "parallel": ("train",)}
"""Kind of text -> the splits of it that are served: those that a generator reads."""


class ServedText:
    """A text whose rows are numbered, the parts one after the other."""

    def __init__(self, vocabulary: vocabularies.Vocabulary, max_length: int) -> None:
        """Begins without a part."""
        self.digest, self.pieces = vocabulary.digest, vocabulary.size  # V
        self.max_length = max_length  # L
        self.parts: list[data_channels.Part] = []  # in the order of their rows
        self._sequences: list[Sequence[Mapping[str, np.ndarray]]] = []
        self._ends: list[int] = []

    def add(
        self, name: str, split: str, key: str, rows: Sequence[Mapping[str, np.ndarray]]
    ) -> None:
        """Adds a part; raises data_channels.DataError if it has too many rows."""
        self.parts.append(data_channels.Part(name, split, key, len(rows)))
        self._sequences.append(rows)
        self._ends = list(itertools.accumulate(part.rows for part in self.parts))
        if len(self) > data_channels.MOST_ROWS:
            raise data_channels.DataError(
                f"{len(self)} rows; at most {data_channels.MOST_ROWS} can be served"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, numbers: Sequence[int], capacity: int) -> np.ndarray:
        """Reads rows by their numbers, each from 0 and less than all there are.

        Returns [N, L] int32, padded; rows beyond the numbers are [PAD] throughout.
        """
        pad = vocabularies.SPECIAL.pad
        found = np.full((capacity, self.max_length), pad, np.int32)
        for row, number in enumerate(numbers):
            part = bisect.bisect_right(self._ends, number)
            first = self._ends[part] - self.parts[part].rows
            ids = self._sequences[part][number - first]["input_ids"]
            found[row, : len(ids)] = ids
        return found


def opened(
    provider: Mapping[str, Any], prepared_dir: pathlib.Path, log: Callable[[str], None]
) -> ServedText:
    """Opens the text behind a handle; what it takes long to make is kept.

    `prepared_dir` gets tokenized text; `log` is called with a warning of a language
    that its vocabulary hardly has. Raises errors.NebulaError if the settings do not
    serve, or the text.
    """
    from nebula_jax.data import packed_text  # here, since many processes read no text

    folder, length = pathlib.Path(provider["text_folder"]), provider["max_length"]
    vocabulary = vocabularies.load(pathlib.Path(provider["vocabulary"]))
    made = ServedText(vocabulary, length)
    for kind, language in _texts(folder):
        prepared = packed_text.prepare(
            folder, kind, language, SPLITS[kind], vocabulary, length, prepared_dir
        )
        if kind == "mono":  # here: a reader's grant would pay for what it looked at
            language_mixture.check_known({language: prepared.splits["valid"]}, log)
        for split, sequences in prepared.splits.items():
            made.add(f"{kind}/{language}", split, prepared.key, sequences)
    return made


def _texts(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Returns kind, and language or pair, of each text in a folder, in order."""
    text_folder.check_folder(folder)

    def languages(pattern: str) -> list[str]:
        names = {path.name.partition(".")[0] for path in folder.glob(pattern)}
        return sorted(names)

    mono = languages("mono/*.train.txt*")
    pairs = languages("parallel/*-*.train.tsv*")
    return [("mono", each) for each in mono] + [("parallel", each) for each in pairs]
