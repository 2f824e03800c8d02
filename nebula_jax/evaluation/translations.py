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
    """The sentences of a language and their translations, padded."""

    english: np.ndarray  # [P, L] int32; of a named pair its first language
    foreign: np.ndarray  # [P, L] int32


def read(
    folder: pathlib.Path,
    languages: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
    most: int,
    max_length: int,
    named: Sequence[str] = (),
) -> dict[str, Pairs]:
    """Reads the first P dev pairs of each language that has any, not English.

    Sentences longer than L lose their ends. With pairs that are `named` (see
    `language_mixture.pairs_of`), their names are the keys. CorpusError at bad text.
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
        english, foreign = zip(*pairs, strict=True)
        found[name] = Pairs(
            _batch(english, vocabulary, max_length),
            _batch(foreign, vocabulary, max_length),
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
    """Compares vectors [P, D] of sentences with those of their translations.

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
    return {"translation_gap": float(own - others), "retrieval": float(np.mean(right))}


def _normalized(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)
