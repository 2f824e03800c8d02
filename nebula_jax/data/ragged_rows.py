"""Tokenised sentences in two flat arrays, and padded rows of them.

N sentences, T tokens in all, B batch, C capacity of a bucket.
"""

import dataclasses
import os
import pathlib
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from nebula_jax import errors
from nebula_jax.data import parallel_side, text_folder

SHOWN = 3
"""So many ids are named in a message; the rest is counted."""

FORMAT = 1  # of the .npz; part of its name's digest
_CHUNK = 10_000  # texts tokenised at once: their lists of ints take far more memory


class TokenError(errors.NebulaError):
    """A sentence that cannot be trained on, or rows that cannot be made."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without [CLS], [SEP] and their like."""


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Sentences of any length, as Arrow keeps them: sentence n is
    `tokens[offsets[n]:offsets[n + 1]]`.
    """

    ids: list[str]
    """[N], of the examples."""
    tokens: np.ndarray
    """[T] int32."""
    offsets: np.ndarray
    """[N + 1] int64, from 0 to T."""
    cut: np.ndarray
    """[any] int32, which sentences were cut to fit."""
    unknown: np.ndarray
    """[any] int32, sentences in which the tokenizer knows not one character."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int32, tokens of each sentence."""
        return np.diff(self.offsets).astype(np.int32)

    def rows(self, indices: np.ndarray, capacity: int, pad: int) -> np.ndarray:
        """Sentences as the rows of a batch.

        Args:
          indices: [B] integers, which sentences.
          capacity: C, at least the longest of them.
          pad: token id of padding.

        Returns:
          [B, C] int32.

        Raises:
          TokenError: if a sentence is longer than C.
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

    def remarks(self, called: str = "sentences") -> list[str]:
        """What a person should know of these rows, in words; empty if nothing.

        Args:
          called: what a row is.
        """
        return [
            f"{len(indices)} of {len(self)} {called} {what}: {self._named(indices)}"
            for indices, what in (
                (self.cut, "were cut"),
                (self.unknown, "have no character that the tokenizer knows"),
            )
            if len(indices)
        ]

    def _named(self, indices: np.ndarray) -> str:
        more = ", ..." if len(indices) > SHOWN else ""
        return ", ".join(self.ids[index] for index in indices[:SHOWN]) + more


def tokenise(
    side: parallel_side.Side,
    tokenizer: Tokenizer,
    max_length: int,
    *,
    unknown: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    truncate: bool = False,
) -> TokenRows:
    """Tokenises the texts of a side.

    Args:
      side: ids and texts.
      tokenizer: see `Tokenizer`.
      max_length: tokens that a sentence may have, `before` and `after` included.
      unknown: token id that stands for what the tokenizer does not know.
      before: put before each sentence, such as [CLS].
      after: put after each sentence, such as [SEP]; a sentence that is cut has it too.
      truncate: whether a longer sentence is cut instead of refused.

    Raises:
      TokenError: at a sentence of more than `max_length` tokens, and if that leaves
        no room for text.
    """
    room = max_length - len(before) - len(after)
    if room < 1:
        raise TokenError(f"max_length {max_length} leaves no room for text")
    parts: list[np.ndarray] = []
    lengths = np.zeros(len(side.ids), np.int64)
    cut, lost = [], []
    for index, text in enumerate(_encoded(side.texts, tokenizer)):
        lengths[index] = len(before) + len(text) + len(after)
        if len(text) > room:
            cut.append(index)
        if all(token == unknown for token in text):
            lost.append(index)
        parts.append(np.asarray([*before, *text[:room], *after], np.int32))
    if cut and not truncate:
        others = f" ({len(cut) - 1} others are too long)" if cut[1:] else ""
        raise TokenError(
            f"example {side.ids[cut[0]]!r} has {lengths[cut[0]]} tokens; at most"
            f" {max_length} are allowed{others}"
        )
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, max_length))])
    return TokenRows(
        list(side.ids),
        np.concatenate([np.zeros(0, np.int32), *parts]),
        offsets.astype(np.int64),
        np.asarray(cut, np.int32),
        np.asarray(lost, np.int32),
    )


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> Iterable[list[int]]:
    for start in range(0, len(texts), _CHUNK):
        yield from tokenizer.encode_batch(list(texts[start : start + _CHUNK]))


def prepare(
    file: pathlib.Path,
    tokenizer: Tokenizer,
    digest: str,
    max_length: int,
    *,
    unknown: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    truncate: bool = False,
    prepared_dir: pathlib.Path,
) -> TokenRows:
    """Tokenises one split of a side, unless that was done before.

    What was prepared is found again by a digest of all that it was made from. One that
    is damaged is made again.

    Args:
      file: of the split (see `sides`).
      tokenizer: see `Tokenizer`.
      digest: tells this tokenizer from all others.
      max_length: as for `tokenise`, like the next four.
      unknown: likewise.
      before: likewise.
      after: likewise.
      truncate: likewise.
      prepared_dir: where the .npz files go, written whole or not at all.

    Raises:
      corpora.CorpusError: where the file is malformed.
      TokenError: at a sentence of more than `max_length` tokens.
    """
    made_from = [FORMAT, text_folder.digest(file), digest, max_length, unknown]
    key = text_folder.digest_of([*made_from, list(before), list(after), truncate])
    split = file.name.partition(".tsv")[0]
    prepared = prepared_dir / f"tokens-{split}-L{max_length}-{key}.npz"
    return kept(
        prepared,
        lambda: tokenise(
            parallel_side.read(file),
            tokenizer,
            max_length,
            unknown=unknown,
            before=before,
            after=after,
            truncate=truncate,
        ),
    )


def kept(file: pathlib.Path, make: Callable[[], TokenRows]) -> TokenRows:
    """The rows in a file; made and written there if there are none, or it is damaged.

    Args:
      file: an .npz whose name says all that the rows are made from.
      make: makes them.
    """
    rows = _load(file)
    if rows is None:
        rows = make()
        _save(file, rows)
    return rows


def _load(file: pathlib.Path) -> TokenRows | None:
    """What `_save` wrote; None if there is none, or it is damaged."""
    try:
        with np.load(file) as arrays:
            ids = arrays["ids"].tobytes().decode().split("\n")
            rest = (arrays[name] for name in ("tokens", "offsets", "cut", "unknown"))
            return TokenRows(ids, *rest)
    except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def _save(file: pathlib.Path, rows: TokenRows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "ids": np.frombuffer("\n".join(rows.ids).encode(), np.uint8),
        "tokens": rows.tokens,
        "offsets": rows.offsets,
        "cut": rows.cut,
        "unknown": rows.unknown,
    }
    handle, partial = tempfile.mkstemp(".partial", file.stem, file.parent)
    try:
        with open(handle, "wb") as stream:
            np.savez(stream, **arrays)
        os.replace(partial, file)
    finally:
        pathlib.Path(partial).unlink(missing_ok=True)
