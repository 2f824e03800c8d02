import numpy as np
import pytest

from nebula_jax.evaluation import bleu, sentence_scores


def scores(nats, tokens, ids=None):
    texts = ["a b c d"] * len(nats)
    counts = bleu.statistics(texts, texts)
    ids = ids or [f"held_out-{n}" for n in range(len(nats))]
    return sentence_scores.Scores(ids, np.asarray(nats), np.asarray(tokens), counts)


def test_the_loss_is_per_token_and_its_error_that_of_a_ratio():
    """By hand: 12 nats of 6 tokens; the sentences are 1 below and 1 above 2 a token."""
    found = sentence_scores.loss(scores([3.0, 9.0], [2, 4]))
    assert found.mean == 2.0
    assert found.standard_error == pytest.approx(np.sqrt(2 * (1 + 1)) / 6)
    assert sentence_scores.loss(scores([3.0], [2])) == (1.5, 0.0)
    same = sentence_scores.loss(scores([4.0, 8.0], [2, 4]))
    assert same == (2.0, 0.0)


def test_sentences_are_paired_if_they_are_the_same_with_as_many_tokens():
    one = scores([3.0, 9.0], [2, 4])
    assert sentence_scores.are_paired(one, scores([1.0, 2.0], [2, 4]))
    assert not sentence_scores.are_paired(one, scores([3.0, 9.0], [2, 5]))
    assert not sentence_scores.are_paired(one, scores([3.0, 9.0], [2, 4], ["a", "b"]))
    assert not sentence_scores.are_paired(one, scores([3.0], [2]))


def test_a_file_gives_back_what_was_written():
    texts = ["a b c", "", "x y"], ["a b d", "e", "x y z"]
    one = scores([3.25, 0.1, 1e-5], [4, 2, 3])._replace(counts=bleu.statistics(*texts))
    text = sentence_scores.dumps(one)
    assert text.count("\n") == 4
    again = sentence_scores.loads(text)
    assert again.ids == one.ids
    for name in ("nats", "tokens", "counts"):
        np.testing.assert_allclose(getattr(again, name), getattr(one, name), rtol=1e-6)
    assert again.counts.shape == (3, 10)
