"""Scores of held-out sentences as a run leaves them."""

from collections.abc import Sequence

import numpy as np

from nebula_jax.evaluation import bleu, sentence_scores


def scores(
    right: Sequence[bool], nats: float, tokens: int = 5
) -> sentence_scores.Scores:
    """Sentences of five words, of which those that are not right lack the last one;
    each has a loss of `nats`, and so many tokens."""
    references = [f"a b c d {number}" for number in range(len(right))]
    hypotheses = [
        reference if is_right else "a b c d x"
        for reference, is_right in zip(references, right, strict=True)
    ]
    return sentence_scores.Scores(
        [f"held_out-{number:06d}" for number in range(len(right))],
        np.full(len(right), nats),
        np.full(len(right), tokens),
        bleu.statistics(hypotheses, references),
    )
