"""The probe of translations, on vectors whose figures are plain."""

import numpy as np
import pytest
import served_corpus

from nebula_jax.evaluation import translations


def test_translations_that_are_alike_and_others_that_are_not():
    first = np.eye(4)
    found = translations.figures(first, 3 * first)
    assert found == {"translation_gap": 1.0, "retrieval": 1.0}


def test_a_common_direction_of_all_sentences_closes_the_gap():
    """As when new heads learn their priors through the encoder: none is nearest."""
    random = np.random.default_rng(0)
    first = random.normal(size=(8, 5))
    second = first + 0.1 * random.normal(size=(8, 5))
    before = translations.figures(first, second)
    assert before["translation_gap"] > 0.8
    assert before["retrieval"] == 1.0
    after = translations.figures(first + 1e3, second + 1e3)
    assert abs(after["translation_gap"]) < 1e-3
    collapsed = translations.figures(np.ones((8, 5)), np.ones((8, 5)))
    assert collapsed["retrieval"] == 0.0


def test_retrieval_counts_both_sides():
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[1.0, 0.1], [1.0, 0.2]])
    found = translations.figures(first, second)
    # Of the first sides both find theirs; of the second ones, the first alone.
    assert found["retrieval"] == 0.75
    own = (1 / np.sqrt(1.01) + 0.2 / np.sqrt(1.04)) / 2
    others = (1 / np.sqrt(1.04) + 0.1 / np.sqrt(1.01)) / 2
    assert found["translation_gap"] == pytest.approx(own - others)


def test_dev_pairs_are_read_where_there_are_any(tmp_path):
    text, vocabulary = served_corpus.corpus(tmp_path)
    rows = ["en\tsw"]
    rows += [f"the house has {n} doors\tina milango {n}" for n in range(5)]
    path = text / "parallel" / "en-sw.dev.tsv"
    path.write_text("".join(f"{row}\n" for row in rows))
    english = vocabulary.encode("the house has 0 doors")
    foreign = vocabulary.encode("ina milango 0")
    assert len(foreign) < len(english)
    length = len(english) + 1  # one too few for the English side
    found = translations.read(text, ["en", "de", "sw"], vocabulary, 3, length)
    assert list(found) == ["sw"]
    assert found["sw"].english.shape == found["sw"].foreign.shape == (3, length)
    assert found["sw"].english[0].tolist() == [2, *english[:-1], 3]
    padding = [0] * (length - 2 - len(foreign))
    assert found["sw"].foreign[0].tolist() == [2, *foreign, 3, *padding]
