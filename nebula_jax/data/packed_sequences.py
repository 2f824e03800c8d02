"""Sentences packed into sequences of at most L tokens.

Whole sentences are joined while they fit, so that few positions are padding:

    monolingual   [CLS] s1 [SEP] s2 [SEP] ... (as InfoXLM's blocks)
    parallel      [CLS] a1 a2 ... [SEP] [SEP] b1 b2 ... [SEP] (ERNIE-M's pair format)
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies

PAIR_SPECIAL_TOKENS = 4  # [CLS], twice [SEP] in the middle, [SEP]


def pack_mono(
    sentences: Iterable[Sequence[int]], max_length: int
) -> Iterator[list[int]]:
    """Yields whole sentences joined to at most L ids, 3 or more, from [CLS] to [SEP].

    They are piece ids, without special tokens; one too long for L is cut up.
    """
    packed = [vocabularies.SPECIAL.cls]
    for sentence in sentences:
        for start in range(0, len(sentence), max_length - 2):
            piece = sentence[start : start + max_length - 2]
            if len(packed) + len(piece) + 1 > max_length:
                yield packed
                packed = [vocabularies.SPECIAL.cls]
            packed += [*piece, vocabularies.SPECIAL.sep]
    if len(packed) > 1:
        yield packed


def pack_pairs(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], max_length: int
) -> Iterator[list[int]]:
    """Yields consecutive pairs joined as `[CLS] A [SEP] [SEP] B [SEP]`, at most L ids.

    They are piece ids of both sides, without special tokens. Of a pair that does not
    fit alone, a side is cut at its end to what the other leaves, but to no less than
    half of the room. One with an empty side is left out. L is at least 6.
    """
    room = max_length - PAIR_SPECIAL_TOKENS
    first: list[int] = []
    second: list[int] = []

    def packed() -> list[int]:
        cls, sep = vocabularies.SPECIAL.cls, vocabularies.SPECIAL.sep
        return [cls, *first, sep, sep, *second, sep]

    for a, b in pairs:
        if not a or not b:
            continue
        if len(a) + len(b) > room:
            of_second = min(len(b), max(room // 2, room - len(a)))
            a, b = a[: room - of_second], b[:of_second]
        if first and len(first) + len(second) + len(a) + len(b) > room:
            yield packed()
            first, second = [], []
        first, second = [*first, *a], [*second, *b]
    if first:
        yield packed()


PACKINGS: dict[str, tuple[str, ...]] = {"mono": (), "parallel": ("1.0.1",)}
"""Kind -> the version of the way it is packed: another one wherever its sequences
change, so that no run goes on at a position in others. Empty for the first."""


class Prepared(NamedTuple):
    """A packed corpus, open."""

    key: str  # digest of all that it was made from
    # Split name -> random-access source of `{"input_ids": [<=L] int32}`.
    splits: dict[str, Sequence[dict[str, np.ndarray]]]
