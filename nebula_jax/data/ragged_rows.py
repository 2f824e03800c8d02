"""Tokenized examples in flat arrays, and padded rows of them.

Sentences are tokenized here, pairs of sentences in `ragged_pairs`.

N examples, T tokens in all, B batch, C capacity of a row, V pieces.
"""

import dataclasses
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from nebula_jax import errors, files
from nebula_jax.data import parallel_side

SHOWN = 3
"""So many ids are named in a message; the others are counted."""

FORMAT = 1  # of the .npz; part of its name's digest
_CHUNK = 10_000  # texts tokenized at once: their lists of ints take far more memory


class TokenError(errors.NebulaError):
    """A sentence that cannot be trained on, or rows that cannot be made."""


class BatchEncoder(Protocol):
    """The part of a tokenizer that `tokenize` needs."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encodes each text, without [CLS], [SEP] and their like."""


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The examples of a split, of any length, as Arrow keeps them.

    Example n is `tokens[offsets[n]:offsets[n + 1]]`.
    """

    ids: list[str]
    """[N], of the examples."""
    tokens: np.ndarray
    """[T] int32."""
    offsets: np.ndarray
    """[N + 1] int64, from 0 to T."""
    cut: np.ndarray
    """[any] int32, examples that were cut to fit."""
    unknown: np.ndarray
    """[any] int32, examples in which no character is in the vocabulary."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each example, [N] int32."""
        return np.diff(self.offsets).astype(np.int32)

    def rows(self, indices: np.ndarray, capacity: int, pad: int) -> np.ndarray:
        """Copies examples into the rows of a batch.

        Args:
          indices: [B] integers, numbers of examples.
          capacity: C, at least the longest of them.
          pad: token id of padding.

        Returns:
          [B, C] int32.

        Raises:
          TokenError: if an example is longer than C.
        """
        starts = self.offsets[indices]
        lengths = self.offsets[np.asarray(indices) + 1] - starts
        if lengths.max(initial=0) > capacity:
            longest = int(np.argmax(lengths))
            raise TokenError(
                f"example {self.ids[indices[longest]]!r} has {lengths[longest]} tokens;"
                f" a row has room for {capacity}"
            )
        places = np.arange(capacity)
        filled = places < lengths[:, None]
        rows = np.full(filled.shape, pad, np.int32)
        rows[filled] = self.tokens[(starts[:, None] + places)[filled]]
        return rows

    def warnings(self, kind: str = "sentences") -> list[str]:
        """Describes examples that were cut or are unknown; empty if there are none.

        Args:
          kind: plural noun for the examples.
        """
        return [
            f"{len(indices)} of {len(self)} {kind} {problem}: {self._named(indices)}"
            for indices, problem in (
                (self.cut, "were cut"),
                (self.unknown, "have no character in the vocabulary"),
            )
            if len(indices)
        ]

    def _named(self, indices: np.ndarray) -> str:
        more = ", ..." if len(indices) > SHOWN else ""
        return ", ".join(self.ids[index] for index in indices[:SHOWN]) + more


def tokenize(
    side: parallel_side.Side,
    tokenizer: BatchEncoder,
    max_length: int,
    *,
    unknown: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    truncate: bool = False,
) -> TokenRows:
    """Tokenizes the texts of a side.

    Args:
      max_length: tokens that a sentence may have, `before` and `after` included.
      unknown: token id of characters that are not in the vocabulary.
      before: put before each sentence, such as [CLS].
      after: put after each sentence, such as [SEP]; a sentence that is cut has it too.
      truncate: cut a longer sentence instead of refusing it.

    Raises:
      TokenError: at a sentence of more than `max_length` tokens, and if that leaves
        no room for text.
    """
    room = max_length - len(before) - len(after)
    if room < 1:
        raise TokenError(f"max_length {max_length} leaves no room for text")
    rows, cut, unknown_rows = [], [], []
    too_long = {}  # index -> tokens
    for index, text in enumerate(encode(side.texts, tokenizer)):
        if len(text) > room:
            cut.append(index)
            too_long[index] = len(before) + len(text) + len(after)
        if all(token == unknown for token in text):
            unknown_rows.append(index)
        rows.append(np.asarray([*before, *text[:room], *after], np.int32))
    if cut and not truncate:
        others = f" ({len(cut) - 1} others are too long)" if cut[1:] else ""
        raise TokenError(
            f"example {side.ids[cut[0]]!r} has {too_long[cut[0]]} tokens; at most"
            f" {max_length} are allowed{others}"
        )
    return join(side.ids, rows, cut, unknown_rows)


def encode(texts: Sequence[str], tokenizer: BatchEncoder) -> Iterator[list[int]]:
    """Yields the token ids of each text; few texts at once are lists of ints."""
    for start in range(0, len(texts), _CHUNK):
        yield from tokenizer.encode_batch(list(texts[start : start + _CHUNK]))


def join(
    ids: Sequence[str],
    rows: Sequence[np.ndarray],
    cut: Sequence[int],
    unknown: Sequence[int],
) -> TokenRows:
    """Joins the rows of N examples.

    Args:
      ids: [N], of the examples.
      rows: [N], the tokens of each, int32.
      cut: ascending numbers of examples that were cut.
      unknown: ascending numbers of examples without a known character.
    """
    return TokenRows(
        list(ids),
        np.concatenate([np.zeros(0, np.int32), *rows]),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.asarray(cut, np.int32),
        np.asarray(unknown, np.int32),
    )


def count_pieces(rows: Iterable[TokenRows], size: int) -> np.ndarray:
    """Counts how often each of V pieces occurs: [V] int64."""
    counts = np.zeros(size, np.int64)
    for each in rows:
        counts += np.bincount(each.tokens, minlength=size)
    return counts


def renumber(rows: TokenRows, keep: np.ndarray) -> TokenRows:
    """Converts rows to the ids of a trimmed tokenizer.

    Args:
      rows: of pieces that are all kept.
      keep: ascending ids (`tokenizers.kept_ids`).
    """
    tokens = np.searchsorted(keep, rows.tokens).astype(np.int32)
    return dataclasses.replace(rows, tokens=tokens)


def prepare(
    file: pathlib.Path,
    tokenizer: BatchEncoder,
    digest: str,
    max_length: int,
    *,
    unknown: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    truncate: bool = False,
    prepared_dir: pathlib.Path,
) -> TokenRows:
    """Tokenizes one split of a side, unless that was done before.

    Args:
      file: of the split (see `parallel_side`).
      tokenizer, max_length, unknown, before, after, truncate: as for `tokenize`.
      digest: differs between tokenizers.
      prepared_dir: gets an .npz file, named by a digest of all that it is made from.

    Raises:
      CorpusError: where the file is malformed.
      TokenError: at a sentence of more than `max_length` tokens.
    """
    made_from = [FORMAT, files.digest(file), digest, max_length, unknown]
    key = files.digest_of([*made_from, list(before), list(after), truncate])
    split = file.name.partition(".tsv")[0]
    return cached(
        prepared_dir / f"tokens-{split}-L{max_length}-{key}.npz",
        lambda: tokenize(
            parallel_side.read(file),
            tokenizer,
            max_length,
            unknown=unknown,
            before=before,
            after=after,
            truncate=truncate,
        ),
    )


def cached(file: pathlib.Path, make: Callable[[], TokenRows]) -> TokenRows:
    """Reads rows from a file; makes and writes them if it is missing or damaged.

    Args:
      file: an .npz whose name holds a digest of all that the rows are made from.
    """
    rows = _load(file)
    if rows is None:
        rows = make()
        _save(file, rows)
    return rows


def _load(file: pathlib.Path) -> TokenRows | None:
    """Reads what `_save` wrote; None if there is nothing, or it is damaged."""
    try:
        with np.load(file) as arrays:
            ids = arrays["ids"].tobytes().decode().split("\n")
            rest = (arrays[name] for name in ("tokens", "offsets", "cut", "unknown"))
            return TokenRows(ids, *rest)
    except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def _save(file: pathlib.Path, rows: TokenRows) -> None:
    arrays = dataclasses.asdict(rows)
    arrays["ids"] = np.frombuffer("\n".join(rows.ids).encode(), np.uint8)
    with files.writing(file) as partial:
        np.savez(partial, **arrays)
