"""Scores of sentences one by one, by which two translators can be compared.

A file of them has a line for each sentence, and no text:

    id <TAB> nats <TAB> tokens <TAB> hypothesis_length ... all_4

N sentences.
"""

from typing import NamedTuple

import numpy as np

from nebula_jax.evaluation import bleu

HEADER = ("id", "nats", "tokens", *bleu.STATISTICS)


class Scores(NamedTuple):
    """The scores of N sentences."""

    ids: list[str]  # [N], of the examples
    nats: np.ndarray  # [N] float64, loss of each sentence
    tokens: np.ndarray  # [N] int64, tokens that the loss is of
    counts: np.ndarray  # [N, 10] int64, `bleu.statistics` of the translations


class Loss(NamedTuple):
    """A loss of many sentences together."""

    mean: float  # nats a token
    standard_error: float  # nats a token, over sentences; 0 of a single one


def loss(scores: Scores) -> Loss:
    """Returns Σ nats / Σ tokens, and its standard error over sentences.

    That of a ratio of sums r: sqrt(N / (N - 1) Σ (nats - r tokens)²) / Σ tokens.
    """
    count, tokens = len(scores.nats), scores.tokens.sum()
    mean = scores.nats.sum() / tokens
    squares = np.sum((scores.nats - mean * scores.tokens) ** 2)
    variance = squares * count / max(1, count - 1)
    return Loss(float(mean), float(np.sqrt(variance) / tokens))


def are_paired(first: Scores, second: Scores) -> bool:
    """Returns True if both are of the same sentences, each of as many tokens."""
    return first.ids == second.ids and np.array_equal(first.tokens, second.tokens)


def dumps(scores: Scores) -> str:
    """Writes scores as lines of text."""
    rows = zip(*scores, strict=True)
    lines = [
        [name, f"{nats:.7g}", tokens, *counts] for name, nats, tokens, counts in rows
    ]
    return "".join("\t".join(map(str, line)) + "\n" for line in [HEADER, *lines])


def loads(text: str) -> Scores:
    """Reads what `dumps` wrote."""
    _, *lines = (line.split("\t") for line in text.splitlines())
    ids, nats, tokens, *counts = zip(*lines, strict=True)
    return Scores(
        list(ids),
        np.asarray(nats, np.float64),
        np.asarray(tokens, np.int64),
        np.asarray(counts, np.int64).T,
    )
