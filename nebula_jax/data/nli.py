"""Sentence pairs that a premise entails, contradicts or neither (XNLI).

    nli/{train,dev,test}.LANG.tsv[.gz]   header `id genre premise hypothesis label`

UTF-8, LF, tabs between fields. A quotation mark is text wherever it stands: XNLI has
hundreds of them without a partner. N examples.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.data import tsv

LABELS = ("entailment", "neutral", "contradiction")  # their numbers are TFDS's
COLUMNS = ("id", "genre", "premise", "hypothesis", "label")


class Examples(NamedTuple):
    """The pairs of one split in one language, in the order of the file."""

    ids: list[str]
    premises: list[str]
    hypotheses: list[str]
    labels: np.ndarray  # [N] int32, places in LABELS


def paths(
    data_dir: pathlib.Path, split: str, languages: Sequence[str]
) -> dict[str, pathlib.Path]:
    """Finds a split's files: language -> file; NoCorpusError if one has none."""
    if not data_dir.is_dir():
        raise tsv.NoCorpusError(f"data_dir={data_dir}: there is no such folder")
    plain = {name: data_dir / "nli" / f"{split}.{name}.tsv" for name in languages}
    there = {name: tsv.plain_or_gzip(path) for name, path in plain.items()}
    found = {name: path for name, path in there.items() if path is not None}
    missing = [name for name in languages if name not in found]
    if missing:
        raise tsv.NoCorpusError(
            f"data_dir={data_dir}: no {split} pairs in {', '.join(missing)}; expected"
            f" {plain[missing[0]]}[.gz] and so on (see experiments/m3/README.md), or"
            " languages that have some"
        )
    return found


def read(file: pathlib.Path) -> Examples:
    """Reads and checks one file.

    CorpusError, with file and line, at another header, another number of fields, an
    unknown label, an empty text, an id that is empty or comes twice, a NUL byte, bad
    UTF-8; and when the file has no example.
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
    """Counts the examples of each label, [N] int32, in the order of LABELS."""
    counts = np.bincount(labels, minlength=len(LABELS))
    return {name: int(count) for name, count in zip(LABELS, counts, strict=True)}
