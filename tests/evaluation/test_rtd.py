import numpy as np
import pytest

from nebula_jax.evaluation import rtd
from nebula_jax.training import m3_predictions


def brute_force(scores, replaced):
    pairs = [
        (p > n) + 0.5 * (p == n) for p in scores[replaced] for n in scores[~replaced]
    ]
    return np.mean(pairs)


@pytest.mark.parametrize("digits", [0, 1, 8])
def test_auc_is_the_chance_that_a_replaced_token_scores_higher(digits):
    random = np.random.RandomState(0)
    scores = random.randn(80).round(digits)  # few digits: many ties
    replaced = random.rand(80) < 0.2
    assert rtd.auc(scores, replaced) == pytest.approx(brute_force(scores, replaced))


def test_auc_of_one_kind_alone_is_not_a_number():
    assert np.isnan(rtd.auc(np.zeros(3), np.zeros(3, bool)))


def test_a_report_counts_text_only_and_adds_batches():
    one = m3_predictions.Predictions(
        replaced_score=np.asarray([[9.0, 2.0, 1.0, 9.0]]),
        replaced=np.asarray([[False, True, False, False]]),
        text=np.asarray([[False, True, True, False]]),
        clm_correct=1,
        sampled_correct=0,
        masked=2,
        originals=np.asarray([[7, 9, 0, 0]]),
        input_ids=np.asarray([[1, 8, 9, 2]]),
        masked_at=np.asarray([[False, True, True, False]]),
    )
    two = one._replace(
        clm_correct=0, sampled_correct=1, originals=np.asarray([[9, 5, 0, 0]])
    )
    report = rtd.report([one, two])
    assert report == {
        "rtd_auc": 1.0,
        "fake_token_rate": 0.5,
        "sampled_mlm_accuracy": 0.25,
        "clm_accuracy": 0.25,
        "unigram_accuracy": 0.5,  # always 9
        "tokens": 4,
    }


def test_a_sample_shows_where_fakes_are_and_which_were_found():
    pieces = ["[PAD]", "[CLS]", "▁the", "▁dog", "▁cat", "▁s", "at", "it", "[SEP]"]
    one = m3_predictions.Predictions(
        replaced_score=np.asarray([[9.0, -1.0, 2.0, -1.0, -2.0, 9.0, 9.0]]),
        replaced=np.asarray([[False, False, True, False, True, False, False]]),
        text=np.asarray([[False, True, True, True, True, False, False]]),
        clm_correct=1,
        sampled_correct=0,
        masked=3,
        originals=np.asarray([[3, 5, 6, 0]]),
        input_ids=np.asarray([[1, 2, 4, 5, 7, 8, 0]]),
        masked_at=np.asarray([[False, False, True, True, True, False, False]]),
    )
    assert rtd.sample(one, 0, pieces.__getitem__) == "the {dog→cat!} s{at→it}"
