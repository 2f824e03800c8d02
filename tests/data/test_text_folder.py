import gzip
import json

import pytest

from nebula_jax.data import text_folder


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_sentences_and_pairs_are_read_plain_or_gzipped(tmp_path, ending):
    mono = write(tmp_path / f"mono/sw.train.txt{ending}", "Habari\nAsante sana\n")
    assert text_folder.mono_path(tmp_path, "sw", "train") == mono
    assert list(text_folder.read_mono(mono)) == ["Habari", "Asante sana"]
    write(mono, "\ufeffHabari\rAsante sana\r")
    assert list(text_folder.read_mono(mono)) == ["Habari", "Asante sana"]
    pairs = write(
        tmp_path / f"parallel/en-sw.train.tsv{ending}",
        "en\tsw\tsource\nThanks\tAsante\tx\nHello\tHabari\ty\n",
    )
    assert text_folder.parallel_path(tmp_path, "en-sw", "train") == pairs
    assert text_folder.parallel_path(tmp_path, "sw-en", "train") == pairs
    wanted = [("Thanks", "Asante"), ("Hello", "Habari")]
    assert list(text_folder.read_parallel(pairs)) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("one\n\nthree\n", ":2: empty line"),
        ("one\n \n", ":2: empty line"),
        (b"one\n\xff\xfe\n", ":2: not UTF-8"),
        ("nul\0\n", ":1: NUL"),
        ("", "has no lines"),
    ],
)
def test_a_malformed_sentence_is_named_with_file_and_line(tmp_path, content, words):
    path = write(tmp_path / "mono/en.train.txt", content)
    with pytest.raises(text_folder.CorpusError, match=f"en.train.txt:? ?.*{words}"):
        list(text_folder.read_mono(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Hello\tHabari\n", ":1: header is"),
        ("en\tfr\nHello\tBonjour\n", ":1: header is 'en<TAB>fr'; by .* en<TAB>sw"),
        ("sw\ten\nHabari\tHello\n", ":1: header is 'sw<TAB>en'"),
        ("en\tsw\tfr\nHello\tHabari\tx\n", ":1: header is 'en<TAB>sw<TAB>fr'"),
    ],
)
def test_a_malformed_pair_is_named_with_file_and_line(tmp_path, content, words):
    path = write(tmp_path / "parallel/en-sw.train.tsv", content)
    with pytest.raises(text_folder.CorpusError, match=words):
        list(text_folder.read_parallel(path))


def test_a_truncated_gzip_file_is_an_error(tmp_path):
    path = write(tmp_path / "mono/en.train.txt.gz", "a sentence\n" * 10_000)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(text_folder.CorpusError, match="cannot be read after line"):
        list(text_folder.read_mono(path))


def test_missing_things_are_named(tmp_path):
    with pytest.raises(text_folder.CorpusError, match="no such folder"):
        text_folder.check_folder(tmp_path / "nowhere")
    with pytest.raises(text_folder.CorpusError, match="no text in it"):
        text_folder.check_folder(tmp_path)
    with pytest.raises(text_folder.CorpusError, match="language 'ur' has no text"):
        text_folder.mono_path(tmp_path, "ur", "train")


def test_languages_are_those_with_text_to_train_on(tmp_path):
    for name in ("sw.train.txt", "en.train.txt.gz", "de.valid.txt", "a.b.train.txt"):
        write(tmp_path / "mono" / name, "a sentence\n")
    write(tmp_path / "mono/families.json", "{}")
    assert text_folder.languages(tmp_path) == ["en", "sw"]
    with pytest.raises(text_folder.CorpusError, match="no such folder"):
        text_folder.languages(tmp_path / "nowhere")


def test_families_come_from_the_folder(tmp_path):
    with pytest.raises(text_folder.CorpusError, match=r"families\.json is missing"):
        text_folder.families(tmp_path, 2)
    content = json.dumps({"example_clusters": {"K=2": [["en"], ["sw"]]}})
    write(tmp_path / "mono/families.json", content)
    assert text_folder.families(tmp_path, 2) == [["en"], ["sw"]]
    write(tmp_path / "mono/families.json", "\ufeff" + content)
    assert text_folder.families(tmp_path, 2) == [["en"], ["sw"]]
    with pytest.raises(text_folder.CorpusError, match="no grouping K=3"):
        text_folder.families(tmp_path, 3)
    write(tmp_path / "mono/families.json", "[" * 100_000)
    with pytest.raises(text_folder.CorpusError, match="has no grouping K=2"):
        text_folder.families(tmp_path, 2)


@pytest.mark.parametrize(
    "grouping", [5, "en de", [["en"]], [["en"], []], [["en"], ["en"]], [["en"], [1]]]
)
def test_a_family_file_that_makes_no_sense_is_an_error(tmp_path, grouping):
    content = json.dumps({"example_clusters": {"K=2": grouping}})
    write(tmp_path / "mono/families.json", content)
    with pytest.raises(text_folder.CorpusError, match="K=2 is not that many lists"):
        text_folder.families(tmp_path, 2)
