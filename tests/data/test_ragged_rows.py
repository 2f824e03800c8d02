import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from nebula_jax.data import parallel_side, ragged_rows, text_folder

PAD, UNKNOWN, FIRST, LAST = range(4)
AROUND = {"before": (FIRST,), "after": (LAST,)}


class Letters:
    """a, b, c ... are 10, 11, 12 ...; anything else is unknown."""

    calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return [[self._token(c) for c in text if c != " "] for text in texts]

    def _token(self, character):
        return 10 + ord(character) - ord("a") if "a" <= character <= "z" else UNKNOWN


def tokenise(texts, max_length=10, **options):
    side = parallel_side.Side([f"train-{n}" for n in range(len(texts))], texts)
    return ragged_rows.tokenize(
        side, Letters(), max_length, unknown=UNKNOWN, **AROUND, **options
    )


def test_rows_are_the_sentences_padded():
    rows = tokenise(["abc", "z", "ab"])
    assert len(rows) == 3
    assert rows.lengths.tolist() == [5, 3, 4]
    batch = rows.rows(np.asarray([2, 0, 2]), 6, PAD)
    assert batch.dtype == np.int32
    assert batch.tolist() == [
        [FIRST, 10, 11, LAST, PAD, PAD],
        [FIRST, 10, 11, 12, LAST, PAD],
        [FIRST, 10, 11, LAST, PAD, PAD],
    ]
    assert rows.warnings() == []


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


def test_an_over_long_sentence_is_named_with_its_tokens():
    with pytest.raises(
        ragged_rows.TokenError,
        match=r"'train-1' has 12 tokens; at most 10 .* \(1 others",
    ):
        tokenise(["abc", "abcdefghij", "abcdefghijk"])


def test_a_length_without_room_for_text_is_an_error():
    with pytest.raises(ragged_rows.TokenError, match="max_length 2 leaves no room"):
        tokenise(["abc"], max_length=2, truncate=True)


def test_an_over_long_sentence_is_cut_if_asked_and_that_is_said():
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
    with pytest.raises(
        ragged_rows.TokenError, match="'train-1' has 5 tokens; a row has room"
    ):
        tokenise(["a", "abc"]).rows([0, 1], 4, PAD)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("id\ttext\nb\tabc\na\tzü\nc\t本\n")
    return file


def prepare(file, tokenizer, *, digest="letters", max_length=8, **options):
    return ragged_rows.prepare(
        file,
        tokenizer,
        digest,
        max_length,
        unknown=UNKNOWN,
        **AROUND,
        prepared_dir=file.parent / "prepared",
        **options,
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
    tokenizer = Letters()
    prepare(file, tokenizer)
    prepare(file, tokenizer, digest="others")
    prepare(file, tokenizer, max_length=7)
    prepare(file, tokenizer, truncate=True)
    file.write_text("id\ttext\na\tabc\n")
    assert prepare(file, tokenizer).ids == ["a"]
    assert tokenizer.calls == 5


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
