"""Rows that are kept, and what is dropped and why."""

import gzip
import json

import pytest

from nebula_jax.data import text_cleaning, text_folder, tsv

LIMITS = text_cleaning.Limits(characters=20, ratio=3.0)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([b"one\tline\r\n"], ["one line"]),
        (["\ufeffone\u2028line \u00a0end"], ["one line end"]),
        (["cafe\u0301"], ["café"]),
        ([b"ein Haus", "une maison"], ["ein Haus", "une maison"]),
    ],
)
def test_white_space_and_forms_of_characters_become_alike(values, texts):
    assert text_cleaning.cleaned(values, LIMITS) == (texts, "")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "undecodable"),
        ([b"\xff\xfe"], "undecodable"),
        (["nul\0"], "undecodable"),
        (["\ud800"], "undecodable"),
        (["\x1b[2J"], "undecodable"),
        ([0], "no text"),
        ([["a"]], "no text"),
        ([b" \n"], "empty"),
        ([None, ""], "empty"),
        (["eins", None], "misaligned"),
        (["no", "deutlich länger"], "misaligned"),
        (["x" * 21], "too long"),
    ],
)
def test_a_row_is_dropped_for_a_reason(values, reason):
    assert text_cleaning.cleaned(values, LIMITS)[1] == reason
    assert reason in text_cleaning.REASONS


def rows(*texts, name="a"):
    return [(f"{name}:{n}", [text]) for n, text in enumerate(texts, start=1)]


def sentences(count, first=0):
    return [f"sentence number {n}" for n in range(first, first + count)]


def texts_of(folder, name, split):
    """The sentences of a language, or the pairs of two."""
    if "-" in name:
        path = text_folder.parallel_path(folder, name, split)
        return list(text_folder.read_parallel(path))
    return list(text_folder.read_mono(text_folder.mono_path(folder, name, split)))


def test_the_report_counts_every_row(tmp_path):
    texts = [*sentences(40), "", "sentence number 3", "\0", "sentence number 4"]
    report = text_cleaning.write(rows(*texts), tmp_path, ["sw"], held_out=5)
    assert report.read == 44 == sum(report.kept.values()) + sum(report.dropped.values())
    assert report.dropped == {"empty": 1, "undecodable": 1, "duplicated": 2}
    assert report.places["duplicated"] == ["a:42", "a:44"]
    train, valid = (texts_of(tmp_path, "sw", each) for each in ("train", "valid"))
    assert len(valid) == 4  # a tenth at most
    assert sorted(train + valid) == sorted(sentences(40))
    assert train == [each for each in sentences(40) if each in train]  # in their order
    words = "\n".join(report.lines())
    assert "44 rows read, 4 dropped" in words
    assert "2 duplicated (the same row came before), first a:42, a:44" in words
    kept = json.loads((tmp_path / "imports" / "sw.train.json").read_text())
    assert kept["dropped"] == report.dropped


def test_no_training_line_is_held_out_but_for_case_and_punctuation(tmp_path):
    texts = sentences(100)
    louder = [f"{text.upper()}!" for text in texts]
    report = text_cleaning.write(rows(*texts, *louder), tmp_path, ["sw"], held_out=9)
    train, valid = (texts_of(tmp_path, "sw", each) for each in ("train", "valid"))
    assert len(valid) == 9
    held_out = {text.casefold().strip("!") for text in valid}
    assert not held_out & {text.casefold().strip("!") for text in train}
    assert report.dropped["held out"] >= len(held_out) - 4


def test_a_split_of_ones_own_is_not_trained_on(tmp_path):
    own = rows(*sentences(10), name="valid")
    text_cleaning.write(own, tmp_path, ["sw"], split="valid")
    report = text_cleaning.write(rows(*sentences(30)), tmp_path, ["sw"])
    assert report.dropped == {"held out": 10}
    assert list(report.kept) == [f"{tmp_path}/mono/sw.train.txt.gz"]
    with pytest.raises(tsv.CorpusError, match=r"sw\.train\.txt\.gz is there already"):
        text_cleaning.write(rows(*sentences(30, 50)), tmp_path, ["sw"])


def test_a_pair_is_written_with_english_first_and_both_splits(tmp_path):
    pairs = [(f"p:{n}", [f"der Satz {n}", f"sentence {n}"]) for n in range(50)]
    text_cleaning.write(pairs, tmp_path, ["de", "en"], held_out=3)
    found = [
        texts_of(tmp_path, pair, split)
        for pair in ("en-de", "de-en")
        for split in ("train", "dev", "test")
    ]
    assert [len(each) for each in found] == [44, 3, 3] * 2
    assert found[0][0][0].startswith("sentence")
    dev = gzip.decompress((tmp_path / "parallel/en-de.dev.tsv.gz").read_bytes())
    assert dev.startswith(b"en\tde\n")


def test_a_training_pair_has_neither_side_of_one_that_is_held_out(tmp_path):
    pairs = [("p", [f"der Satz {n}", f"la phrase {n % 25}"]) for n in range(50)]
    text_cleaning.write(pairs, tmp_path, ["de", "fr"], held_out=5)
    train, dev, test = (
        texts_of(tmp_path, "fr-de", each) for each in ("train", "dev", "test")
    )
    held_out = {french for _, french in dev + test}
    assert not held_out & {french for _, french in train}
    assert not {french for _, french in dev} & {french for _, french in test}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["", "\0"], r"0 rows are left, (?s:.*)1 empty .*a:1\n    1 undecodable"),
        (sentences(9), r"9 rows are left, too few to hold any out \(held_out\)"),
        ([f"a{'!' * n}" for n in range(12)], "every row has a text of one"),
    ],
)
def test_too_few_rows_leave_nothing(tmp_path, texts, words):
    with pytest.raises(tsv.CorpusError, match=words):
        text_cleaning.write(rows(*texts), tmp_path, ["sw"])
    assert not list(tmp_path.rglob("*.gz"))


def test_nothing_is_held_out_if_nobody_asks_and_the_same_rows_are_the_same_bytes(
    tmp_path,
):
    files = set()
    for name in ("one", "two"):
        given = rows("one", "two"), tmp_path / name, ["sw"]
        report = text_cleaning.write(*given, held_out=0)
        assert list(report.kept.values()) == [2]
        files.add((tmp_path / name / "mono" / "sw.train.txt.gz").read_bytes())
    assert len(files) == 1


def lines_of(folder, name, split):
    """The sentences of a language, or of the second language of a pair."""
    found = texts_of(folder, name, split)
    return {second for _, second in found} if "-" in name else {*found}


@pytest.mark.parametrize("first", ["de", "fr-de"])
def test_no_file_trains_on_what_another_holds_out(tmp_path, first):
    """Of one language and of pairs with it, whichever is imported first."""
    german = sentences(100)
    pairs = [("p", [f"la phrase {n}", german[n]]) for n in range(60)]
    imports = [(rows(*german[30:]), ["de"]), (pairs, ["fr", "de"])]
    for given, languages in imports if first == "de" else imports[::-1]:
        report = text_cleaning.write(given, tmp_path, languages, held_out=3)
        assert not report.overlap
    held_out = lines_of(tmp_path, "de", "valid")
    held_out |= lines_of(tmp_path, "fr-de", "dev") | lines_of(tmp_path, "fr-de", "test")
    assert len(held_out) == 9
    trained = lines_of(tmp_path, "de", "train") | lines_of(tmp_path, "fr-de", "train")
    assert not trained & held_out


def test_of_the_same_text_in_many_languages_some_is_held_out_and_counted(tmp_path):
    for language in ("fr", "sw"):
        pairs = [
            ("p", [f"{language} {n}", text]) for n, text in enumerate(sentences(80))
        ]
        report = text_cleaning.write(pairs, tmp_path, [language, "de"], held_out=3)
    assert report.overlap == 6
    assert "6 rows that are held out have a text" in "\n".join(report.lines())
    # What the first pair holds out, the second does not train on.
    held_out = lines_of(tmp_path, "fr-de", "dev") | lines_of(tmp_path, "fr-de", "test")
    assert not held_out & lines_of(tmp_path, "sw-de", "train")
    assert report.dropped["held out"] >= len(held_out)
