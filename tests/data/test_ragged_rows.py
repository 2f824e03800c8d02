import hypothesis
import numpy as np
import pytest
import tiny_nli
from hypothesis import strategies as st

from nebula_jax.data import parallel_side, ragged_rows, text_folder, tokenizers

PAD, UNKNOWN, FIRST, LAST, MASK = range(5)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]


class Letters:
    """a, b, c ... are 10, 11, 12 ...; anything else is unknown."""

    special = tokenizers.SpecialTokens(PAD, UNKNOWN, FIRST, LAST, MASK, 36)
    calls = 0

    def __init__(self, digest="letters"):
        self.digest = digest

    def encode_batch(self, texts):
        self.calls += 1
        return [[self._token(c) for c in text if c != " "] for text in texts]

    def _token(self, character):
        return 10 + ord(character) - ord("a") if "a" <= character <= "z" else UNKNOWN


def tokenise(texts, max_length=10, **options):
    side = parallel_side.Side([f"train-{n}" for n in range(len(texts))], texts)
    return ragged_rows.tokenize(side, Letters(), max_length, **options)


@hypothesis.given(
    st.lists(st.text("abcxyz", min_size=1, max_size=8), min_size=1, max_size=9),
    st.data(),
)
def test_rows_are_what_padding_each_list_gives(texts, data):
    rows = tokenise(texts)
    places = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=5))
    expected = [
        [FIRST, *row, LAST, *[PAD] * (10 - len(row))]
        for row in Letters().encode_batch([texts[place] for place in places])
    ]
    found = rows.rows(np.asarray(places, np.int32), 12, PAD)
    np.testing.assert_array_equal(found, np.reshape(expected, (-1, 12)))


def test_many_texts_are_tokenised_in_parts(monkeypatch):
    monkeypatch.setattr(ragged_rows, "_CHUNK", 4)
    texts = ["abcdefgh"[: 1 + n % 8] for n in range(11)]
    assert tokenise(texts).lengths.tolist() == [len(text) + 2 for text in texts]


def test_an_over_long_sentence_is_named_or_cut_if_asked_and_that_is_said():
    with pytest.raises(ragged_rows.TokenError, match=r"'train-1' has 12 .* \(1 others"):
        tokenise(["abc", "abcdefghij", "abcdefghijk"])
    rows = tokenise(["abc", "abcdefghij"], truncate=True)
    assert rows.rows([1], 10, PAD).tolist() == [[FIRST, *range(10, 18), LAST]]
    assert rows.warnings() == ["1 of 2 sentences were cut: train-1"]
    assert rows.warnings("pairs") == ["1 of 2 pairs were cut: train-1"]


def test_sentences_of_unknown_characters_alone_are_counted_and_named():
    rows = tokenise(["日本", "a本", " ", "本", "本", "本"])
    assert rows.unknown.tolist() == [0, 2, 3, 4, 5]
    assert rows.warnings() == [
        "5 of 6 sentences have no character in the vocabulary:"
        " train-0, train-2, train-3, ..."
    ]


def test_a_row_too_short_for_its_sentence_is_an_error():
    with pytest.raises(ragged_rows.TokenError, match="'train-1' has 5 tokens; a row"):
        tokenise(["a", "abc"]).rows([0, 1], 4, PAD)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("id\ttext\nb\tabc\na\tzü\nc\t本\n")
    return file


def prepare(file, tokenizer, *, max_length=8, **options):
    prepared = file.parent / "prepared"
    return ragged_rows.prepare(
        file, tokenizer, max_length, prepared_dir=prepared, **options
    )


def same(one, other):
    for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert isinstance(mine, list) or mine.dtype == theirs.dtype
    return True


def test_what_was_prepared_is_found_again(file):
    tokenizer = Letters()
    first = prepare(file, tokenizer)
    assert first.ids == ["a", "b", "c"]
    assert same(prepare(file, tokenizer), first)
    assert tokenizer.calls == 1
    assert len(list((file.parent / "prepared").iterdir())) == 1


def test_other_text_tokenizer_or_length_is_prepared_anew(file):
    tokenizer, other = Letters(), Letters("others")
    prepare(file, tokenizer)
    prepare(file, other)
    prepare(file, tokenizer, max_length=7)
    prepare(file, tokenizer, truncate=True)
    file.write_text("id\ttext\na\tabc\n")
    assert prepare(file, tokenizer).ids == ["a"]
    assert (tokenizer.calls, other.calls) == (4, 1)


def test_what_is_damaged_is_prepared_anew(file):
    first = prepare(file, Letters())
    (prepared,) = (file.parent / "prepared").iterdir()
    whole = prepared.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:middle], whole[:150] + b"?" + whole[151:]):
        prepared.write_bytes(damaged)
        assert same(prepare(file, Letters()), first)
        assert prepared.read_bytes()[:150] == whole[:150]


def test_a_failure_leaves_nothing_behind(file, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(file, Letters())
    assert not list((file.parent / "prepared").iterdir())
    with pytest.raises(ragged_rows.TokenError, match="'b' has 5 tokens; at most 4"):
        prepare(file, Letters(), max_length=4)
    file.write_text("id\ttext\na\t\n")
    with pytest.raises(text_folder.CorpusError, match=":2: text is empty"):
        prepare(file, Letters())


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return tokenizers.load(tmp_path)


def pairs(tokenizer, first, second, max_length=16, separators=1):
    found = ragged_rows.tokenize_pairs(
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
    found, texts = pairs(tokenizer, [first], [second], max_length=7)
    assert texts == [text]
    assert len(found.cut) == (first != "a a")


def test_no_pair_is_longer_than_allowed_and_none_is_cut_for_nothing(tokenizer):
    for one in range(1, 9):
        for two in range(1, 9):
            found, _ = pairs(tokenizer, ["a " * one], ["b " * two], max_length=10)
            assert found.lengths[0] == min(10, one + two + 3)


def test_a_pair_has_its_models_form_and_unknown_pieces_are_remarked_on(tokenizer):
    found, texts = pairs(tokenizer, ["x", "a b"], ["y", "c"])
    assert found.unknown.tolist() == [0]
    assert texts[1] == "[CLS] a b [SEP] c [SEP]"
    _, texts = pairs(tokenizer, ["a b"], ["c"], separators=2)
    assert texts == ["[CLS] a b [SEP] [SEP] c [SEP]"]


def test_rows_follow_their_trimmed_tokenizer(tokenizer):
    found, _ = pairs(tokenizer, ["a d"], ["d"])
    counts = ragged_rows.count_pieces([found], tokenizer.size)
    keep = tokenizers.kept_ids(tokenizer, np.flatnonzero(counts))
    trimmed = tokenizers.trim(tokenizer, keep)
    want, texts = pairs(trimmed, ["a d"], ["d"])
    np.testing.assert_array_equal(ragged_rows.renumber(found, keep).tokens, want.tokens)
    assert texts == ["[CLS] a d [SEP] d [SEP]"]


def test_the_pieces_tell_a_models_form(tmp_path, tokenizer):
    assert not ragged_rows.has_double_separator(tokenizer, token_types=2)  # BERT
    assert ragged_rows.has_double_separator(tokenizer, token_types=0)  # ERNIE-M
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "a"]
    tiny_nli.write_model(tmp_path / "e5")
    (tmp_path / "e5" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    e5 = tokenizers.load(tmp_path / "e5")
    assert ragged_rows.has_double_separator(e5, token_types=2)
