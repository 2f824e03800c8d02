import numpy as np
import pytest
import tiny_nli

from nebula_jax.data import ragged_pairs, ragged_rows, tokenizers

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return tokenizers.load(tmp_path)


def rows(tokenizer, first, second, max_length=16, separators=1):
    found = ragged_pairs.tokenize(
        [f"e{n}" for n in range(len(first))],
        first,
        second,
        tokenizer,
        max_length,
        separators=separators,
    )
    texts = [
        " ".join(tokenizer.piece(i) for i in found.rows(np.asarray([n]), 16, 0)[0] if i)
        for n in range(len(first))
    ]
    return found, texts


@pytest.mark.parametrize(
    ("separators", "text"),
    [(1, "[CLS] a b [SEP] c [SEP]"), (2, "[CLS] a b [SEP] [SEP] c [SEP]")],
)
def test_a_pair_has_its_models_form(tokenizer, separators, text):
    assert rows(tokenizer, ["a b"], ["c"], separators=separators)[1] == [text]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("a a a a a", "b", "[CLS] a a a [SEP] b [SEP]"),
        ("a", "b b b b b b", "[CLS] a [SEP] b b b [SEP]"),
        ("a a a a", "b b b b", "[CLS] a a [SEP] b b [SEP]"),
        ("a a", "b b", "[CLS] a a [SEP] b b [SEP]"),
    ],
)
def test_of_a_pair_that_is_too_long_the_longer_sentence_is_cut(
    tokenizer, first, second, text
):
    found, texts = rows(tokenizer, [first], [second], max_length=7)
    assert texts == [text]
    assert len(found.cut) == (first != "a a")


def test_no_pair_is_longer_than_allowed_and_none_is_cut_for_nothing(tokenizer):
    for one in range(1, 9):
        for two in range(1, 9):
            found, _ = rows(tokenizer, ["a " * one], ["b " * two], max_length=10)
            assert found.lengths[0] == min(10, one + two + 3)


def test_pairs_of_unknown_pieces_are_remarked_on(tokenizer):
    found, _ = rows(tokenizer, ["x", "x"], ["y", "a"])
    assert found.unknown.tolist() == [0]


def test_a_length_without_room_is_refused(tokenizer):
    with pytest.raises(ragged_rows.TokenError, match="leaves no room"):
        rows(tokenizer, ["a"], ["b"], max_length=5, separators=2)


def test_rows_follow_their_trimmed_tokenizer(tokenizer):
    found, _ = rows(tokenizer, ["a d"], ["d"])
    counts = ragged_rows.count_pieces([found], tokenizer.size)
    keep = tokenizers.kept_ids(tokenizer, np.flatnonzero(counts))
    trimmed = tokenizers.trim(tokenizer, keep)
    want, texts = rows(trimmed, ["a d"], ["d"])
    np.testing.assert_array_equal(ragged_rows.renumber(found, keep).tokens, want.tokens)
    assert texts == ["[CLS] a d [SEP] d [SEP]"]


def test_the_pieces_tell_a_models_form(tmp_path, tokenizer):
    assert not ragged_pairs.has_double_separator(tokenizer, token_types=2)  # BERT
    assert ragged_pairs.has_double_separator(tokenizer, token_types=0)  # ERNIE-M
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "a"]
    tiny_nli.write_model(tmp_path / "e5")
    (tmp_path / "e5" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    e5 = tokenizers.load(tmp_path / "e5")
    assert ragged_pairs.has_double_separator(e5, token_types=2)
