"""BLEU of translations, by sacrebleu.

Of plain text, without minding case: sacrebleu's standard, with exponential smoothing.
Languages without spaces have tokenizers of their own (`tokenizer_of`).

N sentences, S samples of a bootstrap.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nebula_jax import installed

with installed.extra("experiments"):
    import sacrebleu

ORDERS = 4  # of n-grams
STATISTICS = (
    *("hypothesis_length", "reference_length"),
    *(f"right_{order}" for order in range(1, ORDERS + 1)),
    *(f"all_{order}" for order in range(1, ORDERS + 1)),
)
"""Counts of a sentence: words of both sides, n-grams that are right, and all."""
SAMPLES = 1000
CONFIDENCE = 0.95

_CHINESE = "zh zho chi cmn yue wuu nan hak gan hsn cdo lzh hans hant hani"
_OTHERS = (
    "ja jpn jpan th tha thai lo lao laoo km khm khmr my mya bur shn mymr"
    " bo bod tib dz dzo tibt ii iii yiii"
)
WITHOUT_SPACES = {
    "latn": "13a",
    **dict.fromkeys(_CHINESE.split(), "zh"),
    **dict.fromkeys(_OTHERS.split(), "char"),
}
"""Language (ISO 639-1, -2 and -3) or script (ISO 15924, as in FLORES) -> sacrebleu's
tokenizer, where `13a` would take a clause for a word."""


class Bleu(NamedTuple):
    """A score, and how it was computed."""

    score: float  # 0 to 100
    signature: str  # sacrebleu's, of the settings; scores compare only if it is equal

    def __str__(self) -> str:
        return f"BLEU {self.score:.2f} ({self.signature})"


class Apart(NamedTuple):
    """A difference of two systems' BLEU on the same sentences."""

    difference: float  # BLEU of the second less that of the first
    low: float  # the lower end of the interval that holds it with 95 % confidence
    high: float


def tokenizer_of(language: str) -> str:
    """Returns sacrebleu's tokenizer for the plain text of a language.

    >>> [tokenizer_of(code) for code in ("en", "zho_Hant", "zh-CN", "jpn", "tha_Thai")]
    ['13a', 'zh', 'zh', 'char', 'char']
    """
    name, *others = re.split("[-_]", language.lower())
    known = (each for each in (*others, name) if each in WITHOUT_SPACES)
    return WITHOUT_SPACES.get(next(known, name), "13a")


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> Bleu:
    """Scores translations against one reference each.

    >>> print(corpus_bleu(["The cat sat there."], ["the cat sat there ."]))
    BLEU 100.00 (nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:...)

    A translation may be empty, a reference not. `tokenize` is one of sacrebleu's.
    """
    metric = sacrebleu.BLEU(lowercase=True, tokenize=tokenize, smooth_method="exp")
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(result.score, str(metric.get_signature()))


def statistics(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> np.ndarray:
    """Counts what BLEU is computed from, as `corpus_bleu` does: [N, 10] int64.

    STATISTICS of each sentence; of several sentences they add up.
    """
    # The order that a sentence has is of its score, which is not used.
    metric = sacrebleu.BLEU(lowercase=True, tokenize=tokenize, effective_order=True)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        found = metric.sentence_score(hypothesis, [reference])
        rows.append([found.sys_len, found.ref_len, *found.counts, *found.totals])
    return np.asarray(rows, np.int64)


def of_statistics(statistics: np.ndarray) -> float:
    """Computes BLEU of statistics [N, 10] together, 0 to 100, as `corpus_bleu` does."""
    return _score(statistics.sum(axis=0))


def paired_bootstrap(
    first: np.ndarray, second: np.ndarray, samples: int = SAMPLES, seed: int = 0
) -> Apart:
    """Compares two systems' translations of the same sentences, by [N, 10] statistics.

    Samples of N sentences are drawn with replacement, the same ones of both systems
    (Koehn, 2004). Where each system was trained several times, add up its translations'
    counts: a sentence is then drawn with all of its translations.
    """
    count = len(first)
    draws = np.random.default_rng(seed).multinomial(
        count, np.full(count, 1 / count), size=samples
    )  # [S, N], how often each is drawn
    apart = np.asarray(
        [
            _score(two) - _score(one)
            for one, two in zip(draws @ first, draws @ second, strict=True)
        ]
    )
    difference = of_statistics(second) - of_statistics(first)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(apart, [tail, 1 - tail])
    return Apart(difference, float(low), float(high))


def _score(counts: np.ndarray) -> float:
    """Computes the BLEU of `STATISTICS`, [10], as sacrebleu does, smoothed."""
    words, wanted, *grams = counts.tolist()
    return sacrebleu.BLEU.compute_bleu(
        grams[:ORDERS], grams[ORDERS:], words, wanted, smooth_method="exp"
    ).score
