"""Pairs of sentences as token rows, in the form that each kind of model knows.

    BERT, mBERT, ELECTRA        [CLS] A [SEP] B [SEP]          token types 0 and 1
    XLM-R, e5, MiniLM (XLM-R's) <s> A </s> </s> B </s>         one token type
    ERNIE-M                     [CLS] A [SEP] [SEP] B [SEP]    none

N pairs, V pieces.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from nebula_jax.data import ragged_rows, tokenizers

_CHUNK = 10_000  # texts tokenised at once: their lists of ints take far more memory


def is_joined_by_two(words: tokenizers.Tokenizer, token_types: int) -> bool:
    """Whether two separators stand between the sentences.

    Args:
      words: of the model. XLM-R's pieces tell its kind, whoever made the model:
        multilingual MiniLM and e5 have BERT's two token types and use one of them.
      token_types: that the model has an embedding of.
    """
    return words.piece(words.special.cls) == "<s>" or token_types < 2


def tokenise(
    ids: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    words: tokenizers.Tokenizer,
    max_length: int,
    *,
    separators: int,
) -> ragged_rows.TokenRows:
    """Tokenises pairs; of one that is too long, the longer sentence is cut.

    Args:
      ids: of the pairs.
      first, second: their sentences.
      words: tokenizer.
      max_length: tokens that a pair may have, all included.
      separators: between the sentences, 1 or 2.

    Returns:
      Rows; `cut` and `unknown` count pairs.

    Raises:
      token_rows.TokenError: if `max_length` leaves no room for a piece of each.
    """
    room = max_length - 2 - separators
    if room < 2:
        raise ragged_rows.TokenError(f"max_length {max_length} leaves no room for text")
    between = [words.special.sep] * separators
    parts: list[np.ndarray] = []
    cut, lost = [], []
    pairs = zip(_encoded(first, words), _encoded(second, words), strict=True)
    for index, (one, two) in enumerate(pairs):
        if all(token == words.special.unk for token in itertools.chain(one, two)):
            lost.append(index)
        if len(one) + len(two) > room:
            cut.append(index)
            # As if pieces were taken from the longer one until the pair fits.
            kept = max(room - len(two), room - room // 2)
            one = one[:kept]
            two = two[: room - len(one)]
        parts.append(
            np.asarray(
                [words.special.cls, *one, *between, *two, words.special.sep], np.int32
            )
        )
    offsets = np.cumsum([0, *map(len, parts)])
    return ragged_rows.TokenRows(
        list(ids),
        np.concatenate([np.zeros(0, np.int32), *parts]),
        offsets.astype(np.int64),
        np.asarray(cut, np.int32),
        np.asarray(lost, np.int32),
    )


def _encoded(texts: Sequence[str], words: tokenizers.Tokenizer) -> Iterable[list[int]]:
    for start in range(0, len(texts), _CHUNK):
        yield from words.encode_batch(list(texts[start : start + _CHUNK]))


def count(rows: Iterable[ragged_rows.TokenRows], size: int) -> np.ndarray:
    """How often each piece occurs: [V] int64."""
    counts = np.zeros(size, np.int64)
    for each in rows:
        counts += np.bincount(each.tokens, minlength=size)
    return counts


def renumbered(rows: ragged_rows.TokenRows, keep: np.ndarray) -> ragged_rows.TokenRows:
    """The rows as the tokenizer makes them that `tokenizer.trim` leaves.

    Args:
      rows: of pieces that are all kept.
      keep: ascending ids (`tokenizer.kept_ids`).
    """
    return dataclasses.replace(
        rows, tokens=np.searchsorted(keep, rows.tokens).astype(np.int32)
    )
