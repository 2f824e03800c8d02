"""ERNIE-M's step after sentencepiece: Chinese, digits and punctuation are cut apart.

Paddle's tokenizer does it (and transformers' after it): its list of pieces was made of
the results, not of sentencepiece's pieces.
"""

import itertools
from collections.abc import Iterator, Sequence

SPACE = "▁"
PUNCTUATION = set(",;:.?!~，；：。？！《》【】")


def cut(pieces: Sequence[str]) -> Iterator[str]:
    """Cuts sentencepiece's pieces further.

    >>> list(cut(["▁in", "▁2022年", ",", "▁", "A4"]))
    ['▁in', '2022', '年', ',', '▁', 'A', '4']

    Args:
      pieces: of one text.

    Yields:
      Pieces; a space stays with letters, and alone only inside a word.
    """
    for number, piece in enumerate(pieces):
        if piece == SPACE:
            after = pieces[number + 1 : number + 2]
            if number and after and not after[0].startswith(SPACE):
                yield SPACE
            continue
        for kind, run in itertools.groupby(piece, _kind):
            if kind == "apart":
                yield from run
            elif (text := "".join(run)) != SPACE:
                yield text


def _kind(character: str) -> str:
    if character.isdigit():
        return "digit"
    if character in PUNCTUATION or "\u4e00" <= character <= "\u9fff":
        return "apart"
    return "letter"
