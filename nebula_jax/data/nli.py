"""Sentence pairs that a premise entails, contradicts or neither (XNLI), read strictly.

    nli/{train,dev,test}.LANG.tsv[.gz]   header `id genre premise hypothesis label`

UTF-8, LF, five fields a line with tabs between them. A quotation mark is text wherever
it stands: XNLI has hundreds of them without a partner, and a reader that takes them for
CSV's swallows all lines up to the next one.

N examples.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.data import text_folder

LABELS = ("entailment", "neutral", "contradiction")
"""In the order of their numbers, which is that of TFDS."""

SPLITS = ("train", "dev", "test")
COLUMNS = ("id", "genre", "premise", "hypothesis", "label")


class Examples(NamedTuple):
    """The pairs of one split in one language, in the order of the file."""

    ids: list[str]
    premises: list[str]
    hypotheses: list[str]
    labels: np.ndarray
    """[N] int32, places in LABELS."""


def path(data_dir: pathlib.Path, split: str, language: str) -> pathlib.Path:
    """The file of a split in a language.

    Raises:
      corpora.CorpusError: if there is none.
    """
    plain = data_dir / "nli" / f"{split}.{language}.tsv"
    for candidate in (plain, plain.with_name(plain.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise text_folder.CorpusError(
        f"language {language!r} has no {split} pairs: {plain}[.gz] is missing"
    )


def present(
    data_dir: pathlib.Path, split: str, languages: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Which of the languages have a file, and which have not.

    Raises:
      corpora.CorpusError: if none has, or there is no such folder.
    """
    if not data_dir.is_dir():
        raise text_folder.CorpusError(f"--data_dir={data_dir}: there is no such folder")
    there, missing = [], []
    for language in languages:
        try:
            path(data_dir, split, language)
        except text_folder.CorpusError:
            missing.append(language)
        else:
            there.append(language)
    if not there:
        raise text_folder.CorpusError(
            f"--data_dir={data_dir}: no {split} pairs in it; expected files such as"
            f" {data_dir}/nli/{split}.en.tsv.gz (the layout is in README.md)"
        )
    return there, missing


def read(file: pathlib.Path) -> Examples:
    """Reads and checks one file.

    Raises:
      corpora.CorpusError: with file and line, at another header, another number of
        fields, an unknown label, an empty text, an id that is empty or comes twice, a
        NUL byte, bad UTF-8; and when the file has no example.
    """
    lines = text_folder.numbered_lines(file)
    _, header = next(lines, (1, ""))
    _check_header(file, header)
    seen: dict[str, int] = {}
    premises, hypotheses, labels = [], [], []
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(COLUMNS):
            raise text_folder.CorpusError(
                f"{file}:{number}: {len(fields)} tab-separated fields; expected"
                f" {len(COLUMNS)}{_on_quotes(line)}"
            )
        if "\0" in line:
            raise text_folder.CorpusError(f"{file}:{number}: NUL byte")
        for name, field in zip(COLUMNS, fields, strict=True):
            if name != "genre" and not field.strip():
                raise text_folder.CorpusError(f"{file}:{number}: {name} is empty")
        name, _, premise, hypothesis, label = fields
        if label not in LABELS:
            raise text_folder.CorpusError(
                f"{file}:{number}: unknown label {label!r}; expected"
                f" {', '.join(LABELS)}{_on_quotes(label)}"
            )
        if name in seen:
            raise text_folder.CorpusError(
                f"{file}:{number}: id {name!r} is in line {seen[name]} already"
            )
        seen[name] = number
        premises.append(premise)
        hypotheses.append(hypothesis)
        labels.append(LABELS.index(label))
    if not labels:
        raise text_folder.CorpusError(f"{file}: has no examples")
    return Examples(list(seen), premises, hypotheses, np.asarray(labels, np.int32))


def _on_quotes(text: str) -> str:
    if '"' not in text:
        return ""
    return "; a quotation mark is text here, and quotes no tab or line break"


def _check_header(file: pathlib.Path, header: str) -> None:
    columns = header.split("\t")
    if columns == list(COLUMNS):
        return
    missing = [name for name in COLUMNS if name not in columns]
    what = (
        f"the header has no column {', '.join(map(repr, missing))}"
        if missing
        else f"the header is {header!r}"
    )
    raise text_folder.CorpusError(
        f"{file}:1: {what}; expected {'<TAB>'.join(COLUMNS)}, nothing else"
        f"{_on_quotes(header)}"
    )


def histogram(labels: np.ndarray) -> dict[str, int]:
    """How many examples each label has: label -> count, in the order of LABELS."""
    counts = np.bincount(labels, minlength=len(LABELS))
    return {name: int(count) for name, count in zip(LABELS, counts, strict=True)}
