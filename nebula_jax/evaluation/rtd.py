"""Replaced token detection on held-back text.

Accuracy says little here: nine tokens in ten are original, and a model that always says
so is right that often. So the area under the ROC curve comes first: the chance that a
replaced token scores higher than an original one, 0.5 for a guess. It counts text only:
[CLS] and [SEP] are never replaced and would make the task look easier.
"""

from collections.abc import Sequence

import jax
import numpy as np

from nebula_jax.training import m3


def auc(scores: np.ndarray, replaced: np.ndarray) -> float:
    """Area under the ROC curve; NaN where only one kind of token is there.

    Args:
      scores: [N] float, higher for tokens thought replaced.
      replaced: [N] bool, the truth.
    """
    positive = int(np.sum(replaced))
    negative = len(replaced) - positive
    if not positive or not negative:
        return float("nan")
    # Mann and Whitney's U by ranks; of equals, each has the mean of their ranks.
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    wins = ranks[replaced].sum() - positive * (positive + 1) / 2
    return float(wins / (positive * negative))


def report(judgements: Sequence[m3.Judgement]) -> dict[str, float]:
    """The figures of one language.

    Args:
      judgements: of its held-back batches, as numpy arrays.

    Returns:
      rtd_auc: see above.
      fake_token_rate: share of text tokens that were replaced by another. (A training
        step's metric of that name counts [CLS] and [SEP] among the tokens.)
      sampled_mlm_accuracy: share of masked tokens that the generator sampled right.
      clm_accuracy: share of masked tokens that the discriminator named right.
      tokens: text tokens judged.
    """
    text = np.concatenate([np.asarray(j.text).ravel() for j in judgements])
    scores = np.concatenate([np.asarray(j.replaced_score).ravel() for j in judgements])
    replaced = np.concatenate([np.asarray(j.replaced).ravel() for j in judgements])
    masked = max(1, sum(int(j.masked) for j in judgements))
    return {
        "rtd_auc": auc(scores[text], replaced[text]),
        "fake_token_rate": float(replaced[text].mean()) if text.any() else 0.0,
        "sampled_mlm_accuracy": sum(int(j.sampled_hits) for j in judgements) / masked,
        "clm_accuracy": sum(int(j.clm_hits) for j in judgements) / masked,
        "tokens": int(text.sum()),
    }


class Judged:
    """Judgements of one evaluation, by language."""

    def __init__(self):
        self._judgements: dict[str, list[m3.Judgement]] = {}

    def add(self, language: str, judgement: m3.Judgement) -> None:
        """Takes what was made of one batch."""
        batches_so_far = self._judgements.setdefault(language, [])
        batches_so_far.append(jax.device_get(judgement))

    def report(self) -> dict[str, dict[str, float]]:
        """Language -> figures (see the function `report`)."""
        return {name: report(each) for name, each in self._judgements.items()}
