"""A probe of an encoder: translations lie closer together than other sentences.

It needs no fine-tuning and takes seconds. An encoder whose hidden states all drift one
way has lost what a classifier of sentence pairs would read, long before any loss shows.

P pairs, B sentences of a batch, L length, D width.
"""

import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.data import language_mixture, text_folder, tsv
from nebula_jax.data.tokenizers import vocabulary as vocabularies

FIGURES = ("translation_gap", "retrieval")


class Pairs(NamedTuple):
    """The sentences of a language and their translations.

    english: [P, L] int32, padded; of a named pair its first language.
    foreign: [P, L] int32, padded.
    """

    english: np.ndarray
    foreign: np.ndarray


def read(
    folder: pathlib.Path,
    languages: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
    most: int,
    max_length: int,
    named: Sequence[str] = (),
) -> dict[str, Pairs]:
    """Reads the first dev pairs of each language that has any.

    Args:
      languages: perhaps with English, which has no translation into itself.
      most: P, pairs of a language.
      max_length: L; longer sentences lose their ends.
      named: the run's pairs, see `language_mixture.pairs_of`; their names are the keys.

    Raises:
      tsv.CorpusError: if the text is malformed.
    """
    found = {}
    wanted = [
        (pair if named else language, pair)
        for language in languages
        for pair in language_mixture.pairs_of(language, named)
    ]
    for name, pair in wanted:
        try:
            path = text_folder.parallel_path(folder, pair, "dev")
        except tsv.CorpusError:
            continue
        pairs = list(itertools.islice(text_folder.read_parallel(path), most))
        found[name] = Pairs(
            *(
                _batch([each[side] for each in pairs], vocabulary, max_length)
                for side in (0, 1)
            )
        )
    return found


def _batch(
    sentences: Sequence[str], vocabulary: vocabularies.Vocabulary, max_length: int
) -> np.ndarray:
    special = vocabularies.SPECIAL
    rows = np.full((len(sentences), max_length), special.pad, np.int32)
    for row, sentence in zip(rows, sentences, strict=True):
        pieces = vocabulary.encode(sentence)[: max_length - 2]
        row[: len(pieces) + 2] = [special.cls, *pieces, special.sep]
    return rows


def figures(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Compares sentences with their translations.

    Args:
      first: [P, D], a vector of each sentence.
      second: [P, D], of its translation.

    Returns:
      translation_gap: mean cosine of translations, less that of all other pairs.
      retrieval: share of sentences, of both sides, whose nearest on the other side is
        their translation; of equally near ones, none is the nearest.
    """
    cosines = _normalized(first) @ _normalized(second).T
    count = len(cosines)
    own = np.trace(cosines) / count
    others = (np.sum(cosines) - np.trace(cosines)) / max(1, count * (count - 1))
    right = [
        np.sum(side >= np.diagonal(side)[:, None], axis=1) == 1
        for side in (cosines, cosines.T)
    ]
    return {
        "translation_gap": float(own - others),
        "retrieval": float(np.mean(right)),
    }


def _normalized(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)
