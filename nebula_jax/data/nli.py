"""Sentence pairs that a premise entails, contradicts or neither (XNLI).

    nli/{train,dev,test}.LANG.tsv[.gz]   header `id genre premise hypothesis label`

UTF-8, LF, five fields a line with tabs between them. A quotation mark is text wherever
it stands: XNLI has hundreds of them without a partner.

N examples.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.data import tsv

LABELS = ("entailment", "neutral", "contradiction")
"""In the order of their numbers, which is that of TFDS."""

COLUMNS = ("id", "genre", "premise", "hypothesis", "label")


class Examples(NamedTuple):
    """The pairs of one split in one language, in the order of the file."""

    ids: list[str]
    premises: list[str]
    hypotheses: list[str]
    labels: np.ndarray
    """[N] int32, places in LABELS."""


def path(data_dir: pathlib.Path, split: str, language: str) -> pathlib.Path:
    """Finds the file of a split in a language.

    Raises:
      CorpusError: if there is none.
    """
    plain = data_dir / "nli" / f"{split}.{language}.tsv"
    existing = tsv.plain_or_gzip(plain)
    if existing is None:
        raise tsv.CorpusError(
            f"language {language!r} has no {split} pairs: {plain}[.gz] is missing"
        )
    return existing


def present(
    data_dir: pathlib.Path, split: str, languages: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Parts languages that have a file from those that have none.

    Args:
      data_dir: folder with an `nli/`.
      split: one of SPLITS.
      languages: ISO 639-1 codes.

    Returns:
      The languages with a file, and those without.

    Raises:
      CorpusError: if none has, or there is no such folder.
    """
    if not data_dir.is_dir():
        raise tsv.NoCorpusError(f"data_dir={data_dir}: there is no such folder")
    found, missing = [], []
    for language in languages:
        try:
            path(data_dir, split, language)
        except tsv.CorpusError:
            missing.append(language)
        else:
            found.append(language)
    if not found:
        raise tsv.NoCorpusError(
            f"data_dir={data_dir}: no {split} pairs in it; expected files such as"
            f" {data_dir}/nli/{split}.en.tsv.gz (see experiments/m3/README.md)"
        )
    return found, missing


def read(file: pathlib.Path) -> Examples:
    """Reads and checks one file.

    Raises:
      CorpusError: with file and line, at another header, another number of fields, an
        unknown label, an empty text, an id that is empty or comes twice, a NUL byte,
        bad UTF-8; and when the file has no example.
    """
    ids, premises, hypotheses, labels = [], [], [], []
    for number, (name, _, premise, hypothesis, label) in tsv.rows(
        file, COLUMNS, exact=True, unique="id", may_be_empty=("genre",)
    ):
        if label not in LABELS:
            raise tsv.CorpusError(
                f"{file}:{number}: unknown label {label!r}; expected"
                f" {', '.join(LABELS)}{tsv.quotation_hint(label)}"
            )
        ids.append(name)
        premises.append(premise)
        hypotheses.append(hypothesis)
        labels.append(LABELS.index(label))
    return Examples(ids, premises, hypotheses, np.asarray(labels, np.int32))


def histogram(labels: np.ndarray) -> dict[str, int]:
    """Counts the examples of each label.

    Args:
      labels: [N] int32.

    Returns:
      Label -> count, in the order of LABELS.
    """
    counts = np.bincount(labels, minlength=len(LABELS))
    return {name: int(count) for name, count in zip(LABELS, counts, strict=True)}
