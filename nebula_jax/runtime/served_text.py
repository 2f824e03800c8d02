"""The text behind a handle, as its owner's process reads it.

The settings of a handle lead to it (`nebula data add` writes them), and to nobody else:

    {"kind": "mono", "text_folder": PATH, "vocabulary": PATH, "max_length": L}

N rows, L tokens of a row.
"""

import bisect
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax.data import language_mixture, packed_sequences, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import data_channels

SPLITS = {"mono": ("train", "valid"), "parallel": ("train",)}
"""Kind of text -> the splits of it that are served: those that a generator reads."""


class ServedText:
    """A text folder whose rows are numbered, the parts one after the other.

    Attributes:
      parts: of it, in the order of their rows.
      digest: of the vocabulary.
      pieces: V.
      max_length: L.
    """

    def __init__(self, provider: Mapping[str, Any], prepared_dir: pathlib.Path) -> None:
        """Packs the text, unless that was done before, and opens it.

        Args:
          provider: settings of the handle.
          prepared_dir: gets the packed text.

        Raises:
          errors.NebulaError: if the settings do not serve, or the text.
        """
        kind = provider.get("kind", "mono")
        if kind != "mono":
            raise data_channels.DataError(
                f"data of kind {kind!r} cannot be served yet; mono can"
            )
        try:
            folder = pathlib.Path(provider["text_folder"])
            path, length = pathlib.Path(provider["vocabulary"]), provider["max_length"]
        except (KeyError, TypeError):
            raise data_channels.DataError(
                "the handle's settings lack text_folder, vocabulary or max_length:"
                " register it with `nebula data add`"
            ) from None
        vocabulary = vocabularies.load(path)
        self.digest, self.pieces = vocabulary.digest, vocabulary.size
        self.max_length: int = length
        self.parts: list[data_channels.Part] = []
        self._sequences: list[Sequence[dict[str, np.ndarray]]] = []
        for text, language in _texts(folder):
            made = language_mixture.prepare(
                folder, text, language, SPLITS[text], vocabulary, length, prepared_dir
            )
            self._add(f"{text}/{language}", made)
        self._ends = list(itertools.accumulate(part.rows for part in self.parts))
        if len(self) > data_channels.MOST_ROWS:
            raise data_channels.DataError(
                f"{len(self)} rows; at most {data_channels.MOST_ROWS} can be served"
            )

    def _add(self, name: str, prepared: packed_sequences.Prepared) -> None:
        for split, sequences in prepared.splits.items():
            rows = len(sequences)
            self.parts.append(data_channels.Part(name, split, prepared.key, rows))
            self._sequences.append(sequences)

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
        shape = (capacity, self.max_length)
        found = np.full(shape, vocabularies.SPECIAL.pad, np.int32)
        for row, number in enumerate(numbers):
            part = bisect.bisect_right(self._ends, number)
            first = self._ends[part] - self.parts[part].rows
            ids = self._sequences[part][number - first]["input_ids"]
            found[row, : len(ids)] = ids
        return found


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
