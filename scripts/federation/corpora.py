"""A corpus that is offered: the settings that serve it, its schema, invented rows."""

import pathlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from nebula_jax import printable
from nebula_jax.data import parallel_side, tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.served import owner_text
from nebula_jax.security.grants import data_schema

MONO, SIDE = "mono", "side"
COLUMNS = {
    MONO: {"input_ids": "int32[]"},
    SIDE: {"id": "text", "input_ids": "int32[]"},
}
"""Kind -> the columns of what is served. The ids of a side's examples are what two
sides have in common; see `parallel_side`."""

MOCK_ROWS = 8
MOCK_LENGTH = 16  # tokens at most; enough to see the form
SEED = 20_270_101


class Corpus(NamedTuple):
    """A corpus as its handle has it."""

    provider: dict[str, Any]
    """The settings behind it, which only its owner's processes read."""
    schema: data_schema.Schema
    mock: list[dict[str, Any]]


class _Ids(NamedTuple):
    """The ids of a vocabulary."""

    digest: str
    size: int
    special: tuple[int, ...]
    """Those that are no text."""


def read(
    kind: str,
    folder: pathlib.Path,
    vocabulary: pathlib.Path,
    max_length: int,
    about: str,
    prepared_dir: pathlib.Path,
) -> Corpus:
    """Reads all of a corpus once: a line that does not serve is found now.

    Args:
      kind: MONO, a text folder; or SIDE, of a parallel corpus.
      folder: with the text.
      vocabulary: file of one; of a SIDE, the folder of a tokenizer serves too.
      max_length: tokens of a row.
      about: a line for people; if empty, its languages.
      prepared_dir: gets the packed text of MONO, as when it is served.

    Raises:
      errors.NebulaError: at what does not serve.
    """
    provider = {
        "kind": kind,
        "text_folder": str(folder.resolve()),
        "vocabulary": str(vocabulary.resolve()),
        "max_length": max_length,
    }
    ids = _ids(vocabulary, kind)
    if kind == SIDE:
        found = parallel_side.read(parallel_side.path(folder, "train"))
        rows, languages = len(found.ids), "one side of a parallel corpus"
    else:
        text = owner_text.opened(provider, prepared_dir)
        rows, languages = len(text), _languages([each.name for each in text.parts])
    schema = data_schema.parse(
        {
            "columns": COLUMNS[kind],
            "rows": rows,
            "vocabulary": ids.digest,
            "about": about or printable.line(languages, data_schema.MOST_CHARACTERS),
        }
    )
    return Corpus(provider, schema, _invented(kind, max_length, ids))


def _languages(parts: Sequence[str]) -> str:
    """Returns what is in parts such as `mono/es` and `parallel/es` in words."""
    named = {"mono": "sentences in", "parallel": "pairs of English and"}
    found = []
    for text, words in named.items():
        names = [each.partition("/") for each in dict.fromkeys(parts)]
        languages = [language for kind, _, language in names if kind == text]
        if languages:
            found.append(f"{words} {', '.join(languages)}")
    return "; ".join(found)


def _ids(path: pathlib.Path, kind: str) -> _Ids:
    """Reads a vocabulary. That of a side is a pretrained model's own, in its order."""
    if kind == SIDE and path.is_dir():
        tokenizer = tokenizers.load(path)
        return _Ids(tokenizer.digest, tokenizer.size, tokenizer.special.ids)
    found = vocabularies.load(path)
    return _Ids(found.digest, found.size, vocabularies.SPECIAL.ids)


def _invented(kind: str, max_length: int, ids: _Ids) -> list[dict[str, Any]]:
    """Invents rows. They depend on no text: only on the vocabulary's size."""
    draw, special = random.Random(SEED), set(ids.special)
    longest = min(max_length, MOCK_LENGTH)
    rows: list[dict[str, Any]] = []
    for number in range(MOCK_ROWS):
        length = draw.randint(1, longest)
        drawn = [draw.randrange(ids.size) for _ in range(length)]
        rows.append({"input_ids": [each for each in drawn if each not in special]})
        if kind == SIDE:
            rows[-1]["id"] = f"invented-{number}"
    return rows
