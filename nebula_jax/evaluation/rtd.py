"""Replaced token detection on held-out text.

The area under the ROC curve is the probability that a replaced token scores higher than
an original one, 0.5 for a guess. (Nine tokens in ten are original, and a model that
always predicts so has that accuracy.) It counts text only: [CLS] and [SEP] are never
replaced and would make the task look easier.

The frequencies of a text's pieces are what a language model has to be better than.

N tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.training import m3_predictions

ENOUGH = 4
"""Tokens for each piece seen from which the entropy is right to two tenths of a nat: of
text whose frequencies follow Zipf's law, with up to 40,000 pieces."""


def auc(scores: np.ndarray, replaced: np.ndarray) -> float:
    """Computes the area under the ROC curve; NaN if all tokens are of one kind.

    Of scores [N], higher for tokens predicted as replaced, and labels [N] bool.
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


def sample(
    prediction: m3_predictions.Predictions, row: int, piece: Callable[[int], str]
) -> str:
    """Writes a row as text: `a {dog→cat} sat`; `{dog→cat!}` where a fake was found."""
    originals = iter(prediction.originals[row])
    written = []
    for place, token in enumerate(prediction.input_ids[row]):
        text = piece(int(token))
        if prediction.masked_at[row, place]:
            original = piece(int(next(originals)))
            if prediction.replaced[row, place]:
                found = "!" if prediction.replaced_score[row, place] > 0 else ""
                space = "▁" if original.startswith("▁") else ""
                fake = f"{original.lstrip('▁')}→{text.lstrip('▁')}{found}"
                text = f"{space}{{{fake}}}"
        if prediction.text[row, place]:
            written.append(text)
    return "".join(written).replace("▁", " ").strip()


def report(predictions: Sequence[m3_predictions.Predictions]) -> dict[str, float]:
    """Computes the figures of one language, of its held-out batches as numpy arrays.

    rtd_auc: see above; tokens: number of text tokens.
    fake_token_rate: share of text tokens that were replaced by another. (A training
      step's metric of that name counts [CLS] and [SEP] among the tokens.)
    sampled_mlm_accuracy: share of masked tokens that the generator sampled right.
    clm_accuracy: share of masked tokens that the discriminator predicted right.
    unigram_accuracy: the same of a guess that is the most frequent of them, always:
      the most that frequencies alone can reach.
    """
    text = np.concatenate([np.asarray(p.text).ravel() for p in predictions])
    scores = np.concatenate([np.asarray(p.replaced_score).ravel() for p in predictions])
    replaced = np.concatenate([np.asarray(p.replaced).ravel() for p in predictions])
    masked = max(1, sum(int(p.masked) for p in predictions))
    sampled_correct = sum(int(p.sampled_correct) for p in predictions)
    return {
        "rtd_auc": auc(scores[text], replaced[text]),
        "fake_token_rate": float(replaced[text].mean()) if text.any() else 0.0,
        "sampled_mlm_accuracy": sampled_correct / masked,
        "clm_accuracy": sum(int(p.clm_correct) for p in predictions) / masked,
        "unigram_accuracy": _most_frequent(predictions) / masked,
        "tokens": int(text.sum()),
    }


def _most_frequent(predictions: Sequence[m3_predictions.Predictions]) -> int:
    """Returns how often the most frequent original of all masked tokens comes."""
    originals = np.concatenate([np.ravel(p.originals) for p in predictions])
    originals = originals[originals > 0]  # [PAD] in empty slots
    return int(np.bincount(originals).max()) if len(originals) else 0


class Unigrams:
    """The counts of the pieces of a text that comes in batches."""

    def __init__(self, vocab_size: int) -> None:
        """Begins at nothing."""
        self._counts = np.zeros(vocab_size, np.int64)

    def add(self, input_ids: np.ndarray) -> None:
        """Adds a batch of any shape; padding and control pieces do not count."""
        text = input_ids[input_ids >= vocabularies.NUM_SPECIAL]
        self._counts += np.bincount(text, minlength=len(self._counts))

    def entropy(self) -> float | None:
        """Returns the loss of a model of frequencies alone, nats a token.

        With Miller and Madow's correction: counts of a part of a text make it look more
        regular than it is, by (pieces seen - 1) / (2 tokens). None of a text with fewer
        than ENOUGH tokens for each piece, such as what is left of a run that goes on.
        """
        counts = self._counts[self._counts > 0]
        total = counts.sum()
        if not total or total < ENOUGH * len(counts):
            return None
        shares = counts / total
        return float(-(shares @ np.log(shares)) + (len(counts) - 1) / (2 * total))
