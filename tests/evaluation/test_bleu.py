import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from nebula_jax.evaluation import bleu


def test_without_a_match_the_score_is_zero_and_smoothing_is_as_the_signature_says():
    assert bleu.corpus_bleu(["x y z w"], ["a b c d"]).score == 0
    assert bleu.corpus_bleu([""], ["a b c d"]).score == 0
    # 3 of 4 words, 2 of 3 pairs, 1 of 2 triples, 0 of 1: sacrebleu's takes half of it.
    smoothed = bleu.corpus_bleu(["a b c x"], ["a b c d"])
    assert smoothed.score == pytest.approx(
        100 * (3 / 4 * 2 / 3 * 1 / 2 * (1 / 2) / 1) ** 0.25
    )
    assert "smooth:exp" in smoothed.signature


def test_punctuation_is_a_word_and_case_does_not_matter():
    ours, theirs = ["We sat there, then left."], ["we sat there , then left ."]
    assert bleu.corpus_bleu(ours, theirs).score == pytest.approx(100)


WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=12).map(" ".join)


@hypothesis.given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
def test_counts_of_sentences_add_up_to_the_corpus(pairs):
    hypotheses, references = zip(*pairs, strict=True)
    counts = bleu.statistics(hypotheses, references)
    assert counts.shape == (len(pairs), len(bleu.STATISTICS))
    want = bleu.corpus_bleu(hypotheses, references)
    assert bleu.of_statistics(counts) == pytest.approx(want.score, abs=1e-9)


def systems(count=200):
    """Two systems of which the second has fewer words right, and the references."""
    random = np.random.default_rng(0)
    letters = [f"w{n}" for n in range(30)]

    def spoiled(words, share):
        return [w if random.random() > share else "x" for w in words]

    references = [list(random.choice(letters, 7)) for _ in range(count)]
    texts = [[spoiled(each, share) for each in references] for share in (0.3, 0.42)]
    return [[" ".join(each) for each in system] for system in (*texts, references)]


def test_the_bootstrap_is_the_one_of_texts_drawn_again_and_again():
    """Each sample written out, and scored as any other corpus."""
    texts = [each[:20] for each in systems()]
    counts = [bleu.statistics(each, texts[2]) for each in texts[:2]]
    found = bleu.paired_bootstrap(*counts, samples=50, seed=3)
    random = np.random.default_rng(3)
    apart = []
    for draw in random.multinomial(20, [1 / 20] * 20, size=50):
        drawn = [np.repeat(each, draw).tolist() for each in texts]
        first, second = (bleu.corpus_bleu(each, drawn[2]).score for each in drawn[:2])
        apart.append(second - first)
    assert (found.low, found.high) == pytest.approx(np.quantile(apart, [0.025, 0.975]))
    first, second = (bleu.corpus_bleu(each, texts[2]).score for each in texts[:2])
    assert found.difference == pytest.approx(second - first)


@pytest.mark.parametrize(
    ("language", "tokenize"),
    [
        *(("en", "13a"), ("sw", "13a"), ("zh", "zh"), ("zh_TW", "zh"), ("th", "char")),
        *(("zho_Hans", "zh"), ("jpn", "char"), ("tha_Thai", "char"), ("cmn", "zh")),
        *(("yue_Hant", "zh"), ("khm-Khmr", "char"), ("shn_Mymr", "char")),
        *(("nan_Latn", "13a"), ("eng_Latn", "13a"), ("kor_Hang", "13a")),
    ],
)
def test_a_language_without_spaces_is_not_split_at_spaces(language, tokenize):
    assert bleu.tokenizer_of(language) == tokenize
