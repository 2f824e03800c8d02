"""Tokenized examples in flat arrays, and padded rows of them.

A sentence is [CLS] A [SEP]. A pair has the form that its model expects:

    BERT, mBERT, ELECTRA        [CLS] A [SEP] B [SEP]          token types 0 and 1
    XLM-R, e5, MiniLM (XLM-R's) <s> A </s> </s> B </s>         one token type
    ERNIE-M                     [CLS] A [SEP] [SEP] B [SEP]    none

N examples, T tokens in all, B batch, C capacity of a row, V pieces.
"""

import dataclasses
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from nebula_jax import errors, files
from nebula_jax.data import parallel_side, tokenizers

SHOWN = 3  # so many ids are named in a message; the others are counted

FORMAT = 1  # of the .npz; part of its name's digest
_CHUNK = 10_000  # texts tokenized at once: their lists of ints take far more memory


class TokenError(errors.NebulaError):
    """A sentence that cannot be trained on, or rows that cannot be made."""


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The examples of a split, of any length, as Arrow keeps them.

    Example n is `tokens[offsets[n]:offsets[n + 1]]`.
    """

    ids: list[str]  # [N], of the examples
    tokens: np.ndarray  # [T] int32
    offsets: np.ndarray  # [N + 1] int64, from 0 to T
    cut: np.ndarray  # [any] int32, examples that were cut to fit
    unknown: np.ndarray  # [any] int32, examples without a character in the vocabulary

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each example, [N] int32."""
        return np.diff(self.offsets).astype(np.int32)

    def rows(self, indices: np.ndarray, capacity: int, pad: int) -> np.ndarray:
        """Copies examples [B], padded to [B, C] int32; TokenError if one is longer."""
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
        """Describes examples that were cut or are unknown; empty if there are none."""
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
    tokenizer: tokenizers.Tokenizer,
    max_length: int,
    *,
    truncate: bool = False,
) -> TokenRows:
    """Tokenizes the texts of a side.

    A sentence may have `max_length` tokens, at least 3, [CLS] and [SEP] included. A
    longer one is cut with `truncate`; otherwise it raises TokenError.
    """
    special, room = tokenizer.special, max_length - 2
    rows, cut, unknown = [], {}, []  # cut: index -> tokens
    for index, text in enumerate(_encode(side.texts, tokenizer)):
        if len(text) > room:
            cut[index] = len(text) + 2
        if all(token == special.unk for token in text):
            unknown.append(index)
        row = [special.cls, *text[:room], special.sep]
        rows.append(np.asarray(row, np.int32))
    if cut and not truncate:
        (first, tokens), *others = cut.items()
        more = f" ({len(others)} others are too long)" if others else ""
        raise TokenError(
            f"example {side.ids[first]!r} has {tokens} tokens; at most"
            f" {max_length} are allowed{more}"
        )
    return join(side.ids, rows, list(cut), unknown)


def has_double_separator(tokenizer: tokenizers.Tokenizer, token_types: int) -> bool:
    """Returns whether a model has two separators between the sentences of a pair.

    XLM-R's pieces decide, whoever made the model: multilingual MiniLM and e5 have
    BERT's two token types and use one of them.
    """
    return tokenizer.piece(tokenizer.special.cls) == "<s>" or token_types < 2


def tokenize_pairs(
    ids: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    tokenizer: tokenizers.Tokenizer,
    max_length: int,
    *,
    separators: int,
) -> TokenRows:
    """Tokenizes pairs of sentences, [N] each, with 1 or 2 separators between them.

    A pair may have `max_length` tokens, at least 6, all included. Of one that is too
    long, the longer sentence is cut.
    """
    special, room = tokenizer.special, max_length - 2 - separators
    rows, cut, unknown = [], [], []
    pairs = zip(_encode(first, tokenizer), _encode(second, tokenizer), strict=True)
    for index, (one, two) in enumerate(pairs):
        if all(token == special.unk for token in [*one, *two]):
            unknown.append(index)
        if len(one) + len(two) > room:
            cut.append(index)
            # As if pieces were taken from the longer one until the pair fits.
            one = one[: max(room - len(two), room - room // 2)]
            two = two[: room - len(one)]
        between = [special.sep] * separators
        row = [special.cls, *one, *between, *two, special.sep]
        rows.append(np.asarray(row, np.int32))
    return join(ids, rows, cut, unknown)


def _encode(
    texts: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> Iterator[list[int]]:
    """Yields the token ids of each text; few texts at once are lists of ints."""
    for start in range(0, len(texts), _CHUNK):
        yield from tokenizer.encode_batch(texts[start : start + _CHUNK])


def join(
    ids: Sequence[str],
    rows: Sequence[np.ndarray],
    cut: Sequence[int],
    unknown: Sequence[int],
) -> TokenRows:
    """Joins the tokens of N examples; numbers of those cut and unknown ascend."""
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
    """Converts rows to ids of a tokenizer that was trimmed to `keep`, ascending ids."""
    tokens = np.searchsorted(keep, rows.tokens).astype(np.int32)
    return dataclasses.replace(rows, tokens=tokens)


def prepare(
    file: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
    max_length: int,
    *,
    truncate: bool = False,
    prepared_dir: pathlib.Path,
) -> TokenRows:
    """Tokenizes the file of a split of a side, unless `prepared_dir` has it by digest.

    Raises CorpusError if the file is malformed, and TokenError as `tokenize`.
    """
    special = tokenizer.special
    made_from = [FORMAT, files.digest(file), tokenizer.digest, max_length]
    made_from += [special.unk, [special.cls], [special.sep], truncate]
    name = f"tokens-{file.name.partition('.tsv')[0]}-L{max_length}"

    def make() -> TokenRows:
        side = parallel_side.read(file)
        return tokenize(side, tokenizer, max_length, truncate=truncate)

    return cached(prepared_dir / f"{name}-{files.digest_of(made_from)}.npz", make)


def cached(file: pathlib.Path, make: Callable[[], TokenRows]) -> TokenRows:
    """Reads rows from a file; makes and writes them if it is missing or damaged.

    The .npz file's name holds a digest of all that the rows are made from.
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
