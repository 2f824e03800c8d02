"""Tokenized pairs of sentences, in the form that each kind of model expects.

    BERT, mBERT, ELECTRA        [CLS] A [SEP] B [SEP]          token types 0 and 1
    XLM-R, e5, MiniLM (XLM-R's) <s> A </s> </s> B </s>         one token type
    ERNIE-M                     [CLS] A [SEP] [SEP] B [SEP]    none

N pairs.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from nebula_jax.data import ragged_rows, tokenizers


def has_double_separator(tokenizer: tokenizers.Tokenizer, token_types: int) -> bool:
    """Returns whether a model has two separators between the sentences of a pair.

    Args:
      tokenizer: of the model. XLM-R's pieces decide, whoever made the model:
        multilingual MiniLM and e5 have BERT's two token types and use one of them.
      token_types: token types that the model has an embedding of.
    """
    return tokenizer.piece(tokenizer.special.cls) == "<s>" or token_types < 2


def tokenize(
    ids: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    tokenizer: tokenizers.Tokenizer,
    max_length: int,
    *,
    separators: int,
) -> ragged_rows.TokenRows:
    """Tokenizes pairs; of a pair that is too long, the longer sentence is cut.

    Args:
      ids: [N], of the pairs.
      first, second: [N], their sentences.
      max_length: tokens that a pair may have, all included.
      separators: between the sentences, 1 or 2.

    Raises:
      ragged_rows.TokenError: if `max_length` leaves no room for a piece of each.
    """
    room = max_length - 2 - separators
    if room < 2:
        raise ragged_rows.TokenError(f"max_length {max_length} leaves no room for text")
    special = tokenizer.special
    between = [special.sep] * separators
    rows, cut, unknown_rows = [], [], []
    pairs = zip(
        ragged_rows.encode(first, tokenizer),
        ragged_rows.encode(second, tokenizer),
        strict=True,
    )
    for index, (one, two) in enumerate(pairs):
        if all(token == special.unk for token in itertools.chain(one, two)):
            unknown_rows.append(index)
        if len(one) + len(two) > room:
            cut.append(index)
            # As if pieces were taken from the longer one until the pair fits.
            one = one[: max(room - len(two), room - room // 2)]
            two = two[: room - len(one)]
        row = [special.cls, *one, *between, *two, special.sep]
        rows.append(np.asarray(row, np.int32))
    return ragged_rows.join(ids, rows, cut, unknown_rows)
