import numpy as np
import pytest
from held_out_scores import scores

from nebula_jax.evaluation import bleu, sentence_scores
from scripts.tables import held_out

BESIDE = {
    "0": scores([True, True, True, False], nats=10.0),
    "1": scores([True, True, True, True], nats=11.0),
}
ROW = {
    "0": scores([True, False, True, False], nats=10.5),
    "1": scores([True, True, False, True], nats=11.1),
    "2": scores([True, True, True, True], nats=99.0),
}


def test_a_row_is_compared_seed_by_seed():
    """Losses are 2, 2.2 beside 2.1, 2.22 a token; seed 2 has nothing to be beside."""
    found = held_out.compare(ROW, BESIDE)["held_out"]
    assert found["sentences"] == 4
    assert found["loss"] == pytest.approx({"0": 2.1, "1": 2.22, "2": 19.8})
    assert found["difference"] == pytest.approx({"0": 0.1, "1": 0.02})
    assert found["bleu"]["2"] == pytest.approx(100)


def test_bleu_is_compared_on_each_sentence_with_its_translations_of_all_seeds():
    found = held_out.compare(ROW, BESIDE)["held_out"]["bleu_difference"]
    one, other = (
        np.asarray([rows[seed].counts for seed in "01"]).sum(axis=0)
        for rows in (BESIDE, ROW)
    )
    assert found == bleu.paired_bootstrap(one, other)._asdict()
    assert found["difference"] < 0
    assert found["low"] <= found["difference"] <= found["high"]


def test_what_cannot_be_paired_is_not_compared():
    # No seed in common, and the row that others are beside.
    only = {"2": ROW["2"]}
    for found in (held_out.compare(only, BESIDE), held_out.compare(BESIDE, BESIDE)):
        assert found["held_out"].keys() == {"sentences", "loss", "bleu"}
    # Losses of other predictions; the translations are of the same sentences.
    masked = {seed: each._replace(tokens=each.tokens - 2) for seed, each in ROW.items()}
    found = held_out.compare(masked, BESIDE)["held_out"]
    assert "difference" not in found
    assert found["bleu_difference"]["difference"] < 0
    # Other sentences.
    others = {"0": ROW["0"]._replace(ids=list("abcd"))}
    assert "bleu_difference" not in held_out.compare(others, BESIDE)["held_out"]
    assert held_out.compare({}, BESIDE) == {}


def test_scores_are_read_from_the_figures_of_runs():
    text = sentence_scores.dumps(ROW["0"])
    found = held_out.by_seed(
        {"0": {"held_out": text}, "1": {"held_out": None}, "2": {}}
    )
    assert found.keys() == {"0"}
    assert sentence_scores.are_paired(found["0"], ROW["0"])


def test_bleus_are_of_the_seeds_that_all_rows_have():
    row = held_out.compare(ROW, BESIDE)
    alone = held_out.compare({"1": ROW["1"]}, BESIDE)
    figure = row["held_out"]["bleu"]["1"]
    assert held_out.bleus([row, alone]) == [[figure], [figure]]
