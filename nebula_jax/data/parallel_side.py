"""One side of a parallel corpus: all the text that one cluster of a translator has.

The source cluster has only X and the target cluster only Y (section 3.2). Each has a
folder, and the ids are all that the two folders have in common:

    FOLDER/train.tsv[.gz]  dev.tsv[.gz]  test.tsv[.gz]     header `id<TAB>text`
    FOLDER/NAME.tsv[.gz]                                   any further test set

UTF-8, LF, an example a line, no id twice in a file. Examples are sorted by their ids,
not by their lines, so that both sides number them alike.

An error may be sent to the peer: none of those raised here quotes text.
"""

import pathlib
import re
from typing import NamedTuple

from nebula_jax.data import tsv

SPLITS = ("train", "dev", "test")  # that every side has
HEADER = ("id", "text")

_ID = re.compile(r"[!-~]{1,100}")  # it stands in messages, as a cluster's name does


class Side(NamedTuple):
    """The examples of one split, sorted by id; `texts[n]` belongs to `ids[n]`."""

    ids: list[str]
    texts: list[str]


def path(folder: pathlib.Path, split: str) -> pathlib.Path:
    """Finds the file of a split; CorpusError if there is none."""
    existing = tsv.plain_or_gzip(folder / f"{split}.tsv")
    if existing is None:
        raise tsv.CorpusError(
            f"{folder}: {split}.tsv.gz is missing; a side of a parallel corpus is a"
            f" folder with {', '.join(SPLITS)}, .tsv or .tsv.gz"
        )
    return existing


def splits(folder: pathlib.Path) -> tuple[str, ...]:
    """Lists SPLITS, then further test sets; CorpusError if one of SPLITS is missing."""
    for split in SPLITS:
        path(folder, split)
    files = [*folder.glob("*.tsv"), *folder.glob("*.tsv.gz")]
    names = {each.name.partition(".tsv")[0] for each in files}
    return (*SPLITS, *sorted(names - set(SPLITS)))


def read(file: pathlib.Path) -> Side:
    """Reads and checks one split.

    Raises CorpusError, with file and line, at another header (a side must not hold the
    other's text), another number of fields, an empty text, a control character, bad
    UTF-8, an id that is no id or comes twice; and when the file has no example.
    """
    examples = []
    for number, (name, text) in tsv.rows(
        file, HEADER, exact=True, unique="id", forbidden=tsv.CONTROL
    ):
        if not _ID.fullmatch(name):
            raise tsv.CorpusError(
                f"{file}:{number}: an id is 1 to 100 printable ASCII characters"
                " without spaces"
            )
        examples.append((name, text))
    ids, texts = zip(*sorted(examples), strict=True)
    return Side(list(ids), list(texts))
