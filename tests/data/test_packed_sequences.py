import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nebula_jax.data import packed_sequences, packed_text, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies

CLS, SEP = vocabularies.SPECIAL.cls, vocabularies.SPECIAL.sep
IDS = st.lists(st.integers(5, 99), min_size=1, max_size=30)


def test_whole_sentences_are_joined_while_they_fit_and_cut_up_if_they_never_do():
    packed = packed_sequences.pack_mono([[5, 6], [7], [8, 9, 10]], max_length=7)
    assert list(packed) == [[CLS, 5, 6, SEP, 7, SEP], [CLS, 8, 9, 10, SEP]]
    packed = packed_sequences.pack_mono([[5, 6, 7, 8, 9]], max_length=4)
    assert list(packed) == [[CLS, 5, 6, SEP], [CLS, 7, 8, SEP], [CLS, 9, SEP]]


def test_pairs_have_the_papers_format_and_stay_parallel():
    pairs = [([5, 6], [7]), ([8], [9]), ([10, 11, 12], [13, 14])]
    packed = list(packed_sequences.pack_pairs(pairs, max_length=9))
    assert packed == [
        [CLS, 5, 6, 8, SEP, SEP, 7, 9, SEP],
        [CLS, 10, 11, 12, SEP, SEP, 13, 14, SEP],
    ]


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [((20, 100), (20, 40)), ((100, 20), (40, 20)), ((99, 31), (30, 30))],
)
def test_a_pair_that_does_not_fit_fills_the_sequence(lengths, kept):
    """A short side leaves its room to the other; both have half of it at least."""
    first, second = (list(range(5, 5 + length)) for length in lengths)
    [sequence] = packed_sequences.pack_pairs([(first, second)], max_length=64)
    middle = sequence.index(SEP)
    assert sequence[1:middle] == first[: kept[0]]
    assert sequence[middle + 2 : -1] == second[: kept[1]]


@given(st.lists(IDS, max_size=20), st.integers(3, 40))
def test_packing_loses_no_token_and_never_overflows(sentences, max_length):
    packed = list(packed_sequences.pack_mono(sentences, max_length))
    text = [i for sequence in packed for i in sequence if i >= vocabularies.NUM_SPECIAL]
    assert text == [i for sentence in sentences for i in sentence]
    assert all(3 <= len(sequence) <= max_length for sequence in packed)
    assert all(s[0] == CLS and s[-1] == SEP for s in packed)


@given(st.lists(st.tuples(IDS, IDS), max_size=20), st.integers(6, 40))
def test_packed_pairs_have_two_sides_and_never_overflow(pairs, max_length):
    for sequence in packed_sequences.pack_pairs(pairs, max_length):
        assert len(sequence) <= max_length
        first, middle, second, end = "".join(
            {CLS: "c", SEP: "|"}.get(i, "x") for i in sequence
        ).split("|")
        assert first.strip("x") == "c"
        assert len(first) > 1
        assert middle == end == ""
        assert second.strip("x") == ""
        assert second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [f"sentence {n} about {n * 3}" for n in range(200)]
    (folder / "mono").mkdir()
    (folder / "parallel").mkdir()
    (folder / "mono" / "en.train.txt").write_text(
        "".join(line + "\n" for line in lines)
    )
    (folder / "parallel" / "en-sw.train.tsv").write_text(
        "en\tsw\n" + "".join(f"{line}\tsentensi {line}\n" for line in lines)
    )
    vocabularies.train(lines, 90, folder / "v.model")
    return folder


def prepare(folder, prepared_dir, kind="mono", language="en", max_length=32):
    vocabulary = vocabularies.load(folder / "v.model")
    return packed_text.prepare(
        folder, kind, language, ["train"], vocabulary, max_length, prepared_dir
    )


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    """The folder of a corpus that is prepared."""
    prepare(folder, made := tmp_path_factory.mktemp("prepared"))
    return made


def test_a_prepared_corpus_is_the_text_in_order(folder, prepared):
    loaded = vocabularies.load(folder / "v.model")
    source = prepare(folder, prepared).splits["train"]
    sentences = map(loaded.encode, text_folder.read_mono(folder / "mono/en.train.txt"))
    expected = list(packed_sequences.pack_mono(sentences, 32))
    assert [source[i]["input_ids"].tolist() for i in range(len(source))] == expected
    assert source[0]["input_ids"].dtype == np.int32


def test_preparing_happens_once_and_again_when_something_changed(folder, tmp_path):
    def found():
        return sorted(p.parent for p in tmp_path.rglob("dataset_info.json"))

    prepare(folder, tmp_path)
    first = found()
    prepare(folder, tmp_path)
    assert found() == first
    prepare(folder, tmp_path, max_length=16)
    assert len(found()) == 2
    prepare(folder, tmp_path, kind="parallel", language="en-sw")
    assert len(found()) == 3


def test_a_run_does_not_go_on_with_text_that_is_packed_otherwise(
    folder, tmp_path, monkeypatch
):
    """Its position in the text would be another sequence."""

    def keys():
        pairs = {"kind": "parallel", "language": "en-sw"}
        made = prepare(folder, tmp_path), prepare(folder, tmp_path, **pairs)
        return {each.key for each in made}

    before = keys()
    for changed in ("mono", "parallel"):
        with monkeypatch.context() as patch:
            patch.setitem(packed_sequences.PACKINGS, changed, ("9.9.9",))
            assert len(keys() & before) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "torn info"])
def test_a_damaged_prepared_corpus_is_named(folder, prepared, tmp_path, damage):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    (records,) = tmp_path.rglob("*array_record*-of-*")
    if damage == "cut":
        records.write_bytes(records.read_bytes()[:200])
    elif damage == "gone":
        records.unlink()
    else:
        (records.parent / "dataset_info.json").write_text('{"na')
    with pytest.raises(text_folder.CorpusError, match="remove it and try again"):
        prepare(folder, tmp_path)


def test_a_malformed_line_stops_preparation_and_leaves_nothing_usable(folder, tmp_path):
    bad = folder / "mono" / "bad.train.txt"
    bad.write_text("fine\n\n")
    for _ in range(2):
        with pytest.raises(text_folder.CorpusError, match=r"bad\.train\.txt:2: empty"):
            prepare(folder, tmp_path, language="bad")
