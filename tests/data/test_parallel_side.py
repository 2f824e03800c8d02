import gzip
import importlib.util
import json

import pytest

from nebula_jax.data import parallel_side, split_parallel
from nebula_jax.data import text_folder as corpora

PAIRS = {"train": 6, "dev": 2, "test": 2}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def text_folder(tmp_path):
    """Pair n of a split is `<split> English n` and `<split> español n`."""
    folder = tmp_path / "text"
    for split, count in PAIRS.items():
        rows = [
            f"{split} English {n}\t{split} español {n}\t{'spoken' if n % 2 else 'news'}"
            for n in range(1, count + 1)
        ]
        content = "\n".join(["en\tes\tsource", *rows, ""])
        write(folder / "parallel" / f"en-es.{split}.tsv.gz", content)
    flores = "en\tfr\tes\nflores English 1\tflores français 1\tflores español 1\n"
    write(folder / "parallel" / "flores200-devtest.15way.tsv.gz", flores)
    return folder


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def read(folder, split):
    return parallel_side.read(parallel_side.path(folder, split))


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz"])
def test_examples_are_read_in_the_order_of_their_ids(tmp_path, ending):
    file = write(tmp_path / f"train{ending}", "id\ttext\nb\tzwei\na\teins\n")
    assert parallel_side.path(tmp_path, "train") == file
    assert parallel_side.read(file) == parallel_side.Side(["a", "b"], ["eins", "zwei"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id\ttext\ten\n", r":1: the header has 3 columns; .* nothing else"),
        ("id\ttext\na\teins\na b\tzwei\n", r":3: an id is"),
        ("id\ttext\na\teins\né\tzwei\n", r":3: an id is"),
        ("id\ttext\na\teins\nb\tzwei\na\tdrei\n", r":4: id 'a' is in line 2 already"),
        ("id\ttext\na\tei\rns\n", r":2: control character U\+000D in text"),
    ],
)
def test_a_malformed_side_is_named_with_file_and_line(tmp_path, content, words):
    with pytest.raises(corpora.CorpusError, match=rf"train\.tsv:? ?.*{words}") as error:
        parallel_side.read(write(tmp_path / "train.tsv", content))
    assert not any(word in str(error.value) for word in ("eins", "zwei", "drei"))


def test_a_missing_split_is_named(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.tsv", "id\ttext\na\teins\n")
    with pytest.raises(corpora.CorpusError, match=r"dev\.tsv\.gz is missing"):
        parallel_side.splits(tmp_path)


def test_each_side_gets_its_own_language_and_the_same_ids(text_folder, tmp_path):
    out = tmp_path / "sides"
    source, target = split_parallel.split(text_folder, ("es", "en"), out)
    assert (source, target) == (out / "source", out / "target")
    assert parallel_side.splits(source) == ("train", "dev", "test", "flores")
    for folder, foreign in ((source, "English"), (target, "español")):
        for content in contents(folder).values():
            assert foreign not in gzip.decompress(content).decode()
    for split in parallel_side.splits(source):
        x, y = read(source, split), read(target, split)
        assert x.ids == y.ids
        assert [text.replace("español", "English") for text in x.texts] == y.texts
    assert read(source, "train").ids[:2] == ["train-000001", "train-000002"]
    assert read(source, "train").texts[1] == "train español 2"
    assert read(source, "flores") == parallel_side.Side(
        ["flores-000001"], ["flores español 1"]
    )
    source, _ = split_parallel.split(text_folder, ("en", "es"), tmp_path / "other")
    assert read(source, "dev").texts[0] == "dev English 1"


def test_what_is_left_out_changes_no_id(text_folder, tmp_path):
    source, target = split_parallel.split(
        text_folder, ("es", "en"), tmp_path / "news", sources=["news"]
    )
    ids = ["train-000002", "train-000004", "train-000006"]
    assert read(source, "train").ids == read(target, "train").ids == ids
    assert len(read(source, "dev").ids) == PAIRS["dev"]

    chosen = []
    for count in (2, 4):
        source, _ = split_parallel.split(
            text_folder, ("es", "en"), tmp_path / f"{count}", max_pairs=count
        )
        train = read(source, "train")
        chosen.append(set(train.ids))
        assert [f"train-{int(t.split()[-1]):06d}" for t in train.texts] == train.ids
    assert list(map(len, chosen)) == [2, 4]
    assert chosen[0] < chosen[1]


def test_splitting_twice_gives_the_same_bytes_and_once_is_enough(text_folder, tmp_path):
    for name in ("one", "two"):
        split_parallel.split(text_folder, ("es", "en"), tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")

    edited = tmp_path / "one/source/dev.tsv.gz"
    write(edited, "id\ttext\nmine\tmío\n")
    split_parallel.split(text_folder, ("es", "en"), tmp_path / "one")
    assert parallel_side.read(edited).ids == ["mine"]


def test_short_pairs_alone_are_taken_if_both_sides_are_short(text_folder, tmp_path):
    rows = ["en\tes\tsource", "a b\tc d\tx", "a b c\td\tx", "a\tb c d\tx", "e\tf\tx"]
    for split in ("train", "dev", "test"):
        path = text_folder / "parallel" / f"en-es.{split}.tsv.gz"
        write(path, "\n".join([*rows, ""]))
    source, target = split_parallel.split(
        text_folder, ("es", "en"), tmp_path / "short", max_words=2
    )
    for split in ("train", "dev", "test"):
        ids = [f"{split}-000001", f"{split}-000004"]
        assert read(source, split).ids == read(target, split).ids == ids
    assert parallel_side.splits(source) == ("train", "dev", "test")  # FLORES is long
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split_parallel.split(text_folder, ("es", "en"), tmp_path / "short")


def test_what_is_there_is_never_overwritten(text_folder, tmp_path):
    out = tmp_path / "sides"
    split_parallel.split(text_folder, ("es", "en"), out)
    before = contents(out)
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split_parallel.split(text_folder, ("es", "en"), out, max_pairs=2)
    write(text_folder / "parallel/en-es.dev.tsv.gz", "en\tes\nHello\tHola\n")
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split_parallel.split(text_folder, ("es", "en"), out)
    assert contents(out) == before
    with pytest.raises(corpora.CorpusError, match="no split of a parallel corpus"):
        split_parallel.split(text_folder, ("es", "en"), text_folder)


def test_a_split_that_fails_leaves_nothing(text_folder, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dumps", fail)  # the manifest is written last
    with pytest.raises(OSError, match="disk full"):
        split_parallel.split(text_folder, ("es", "en"), tmp_path / "out/sides")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("languages", "options", "words"),
    [
        (("es", "fr"), {}, "the pair 'es-fr' has no text"),
        (("en", "en"), {}, "expected two that differ"),
        (("fr", "en"), {}, "the pair 'fr-en' has no text"),
        (("es", "en"), {"sources": ["news", "x"]}, "source x; there are news, spoken"),
    ],
)
def test_what_cannot_be_split_is_an_error(
    text_folder, tmp_path, languages, options, words
):
    with pytest.raises(corpora.CorpusError, match=words):
        split_parallel.split(text_folder, languages, tmp_path / "sides", **options)


def test_a_malformed_pair_is_named(text_folder, tmp_path):
    write(text_folder / "parallel/en-es.dev.tsv.gz", "en\tes\nHel\x07lo\tHola\n")
    words = r"dev\.tsv\.gz:2: control character U\+0007"
    with pytest.raises(corpora.CorpusError, match=words):
        split_parallel.split(text_folder, ("es", "en"), tmp_path / "sides")


def test_djangos_messages_are_split_without_any_text_folder(tmp_path):
    out = tmp_path / "sides"
    source, target = split_parallel.split(split_parallel.DJANGO, ("es", "en"), out)
    assert parallel_side.splits(source) == parallel_side.SPLITS
    texts = {}
    for split in parallel_side.SPLITS:
        x, y = read(source, split), read(target, split)
        assert x.ids == y.ids
        texts[split] = dict(zip(y.texts, x.texts, strict=True))
    assert texts["train"]["A JSON object"] == "Un objeto JSON"
    assert len(texts["train"]) > 300
    assert abs(len(texts["dev"]) - len(texts["test"])) <= 1
    assert texts["test"].keys().isdisjoint(texts["dev"].keys() | texts["train"].keys())


def test_without_django_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(corpora.CorpusError, match="pip install 'Django<6'"):
        split_parallel.split(split_parallel.DJANGO, ("es", "en"), tmp_path / "sides")
    assert not list(tmp_path.iterdir())
