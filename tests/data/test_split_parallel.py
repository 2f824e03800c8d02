"""A corpus split into two sides, some of its training pairs held out."""

import gzip
import importlib.util
import json

import pytest

from nebula_jax.data import parallel_side, split_parallel
from nebula_jax.data import text_folder as corpora

TRAIN = 40
OTHERS = "abcd"
"""Names of the pairs of dev, and of test."""


def pair(n):
    return f"English {n}", f"español {n}"


@pytest.fixture
def text_folder(tmp_path):
    return write_text(tmp_path / "text", [pair(n) for n in range(1, TRAIN + 1)])


def write_text(folder, train):
    """A text folder with these training pairs, each from a source of its parity."""
    others = list(map(pair, OTHERS))
    for split, pairs in (("train", train), ("dev", others), ("test", others)):
        rows = [f"{en}\t{es}\t{'ab'[n % 2]}" for n, (en, es) in enumerate(pairs)]
        write(folder / "parallel" / f"en-es.{split}.tsv", "en\tes\tsource", *rows)
    return folder


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def split(text_folder, out, **options):
    """The two sides' texts by split and id."""
    return read(split_parallel.split(text_folder, ("es", "en"), out, **options))


def read(folders):
    return [
        {
            name: dict(
                zip(*parallel_side.read(parallel_side.path(each, name)), strict=True)
            )
            for name in parallel_side.splits(each)
        }
        for each in folders
    ]


def numbers(side, name):
    return {int(each.rpartition("-")[2]) for each in side[name]}


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_each_side_gets_its_own_language_and_the_same_ids(text_folder, tmp_path):
    folders = split_parallel.split(text_folder, ("es", "en"), tmp_path / "sides")
    assert folders == (tmp_path / "sides/source", tmp_path / "sides/target")
    for folder, foreign in zip(folders, ("English", "español"), strict=True):
        for content in contents(folder).values():
            assert foreign not in gzip.decompress(content).decode()
    source, target = read(folders)
    assert list(source) == ["train", "dev", "test"]
    for name, texts in source.items():
        assert target[name] == {
            each: text.replace("español", "English") for each, text in texts.items()
        }
    assert list(source["train"])[:2] == ["train-000001", "train-000002"]
    assert source["train"]["train-000002"] == "español 2"
    folders = split_parallel.split(text_folder, ("en", "es"), tmp_path / "other")
    assert read(folders)[0]["dev"]["dev-000001"] == "English a"


def test_what_is_left_out_changes_no_id(text_folder, tmp_path):
    source, target = split(text_folder, tmp_path / "b", sources=["b"])
    assert numbers(source, "train") == numbers(target, "train") == {*range(2, 41, 2)}
    assert len(source["dev"]) == len(OTHERS)
    chosen = []
    for count in (2, 4):
        source, _ = split(text_folder, tmp_path / f"{count}", max_pairs=count)
        assert len(source["train"]) == count
        chosen.append(source["train"].items())
    every, _ = split(text_folder, tmp_path / "all")
    assert chosen[0] < chosen[1] < every["train"].items()


def test_splitting_twice_gives_the_same_bytes_and_once_is_enough(text_folder, tmp_path):
    for name in ("one", "two"):
        split(text_folder, tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    write(tmp_path / "one/source/dev.tsv.gz", "id\ttext", "mine\tmío")
    assert split(text_folder, tmp_path / "one")[0]["dev"] == {"mine": "mío"}


def test_short_pairs_alone_are_taken_if_both_sides_are_short(tmp_path):
    rows = ["a b\tc d", "a b c\td", "a\tb c d", "e\tf"]
    folder = tmp_path / "text" / "parallel"
    for name in parallel_side.SPLITS:
        write(folder / f"en-es.{name}.tsv.gz", "en\tes", *rows)
    write(folder / "flores200-devtest.15way.tsv", "en\tes", rows[0])
    for side in split(tmp_path / "text", tmp_path / "short", max_words=2):
        assert list(side) == [*parallel_side.SPLITS]  # FLORES is long
        for name in side:
            assert numbers(side, name) == {1, 4}
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split(tmp_path / "text", tmp_path / "short")


def test_what_is_there_is_never_overwritten(text_folder, tmp_path):
    out = tmp_path / "sides"
    split(text_folder, out)
    before = contents(out)
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split(text_folder, out, max_pairs=2)
    write(text_folder / "parallel/en-es.dev.tsv", "en\tes", "Hello\tHola")
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split(text_folder, out)
    assert contents(out) == before
    with pytest.raises(corpora.CorpusError, match="no split of a parallel corpus"):
        split(text_folder, text_folder)


def test_a_split_that_fails_leaves_nothing(text_folder, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dumps", fail)  # the manifest is written last
    with pytest.raises(OSError, match="disk full"):
        split(text_folder, tmp_path / "out/sides")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("languages", "options", "words"),
    [
        (("es", "fr"), {}, "the pair 'es-fr' has no text"),
        (("en", "en"), {}, "expected two that differ"),
        (("fr", "en"), {}, "the pair 'fr-en' has no text"),
        (("es", "en"), {"sources": ["a", "x"]}, "source x; there are a, b"),
    ],
)
def test_what_cannot_be_split_is_an_error(
    text_folder, tmp_path, languages, options, words
):
    with pytest.raises(corpora.CorpusError, match=words):
        split_parallel.split(text_folder, languages, tmp_path / "sides", **options)


def test_djangos_messages_are_split_without_any_text_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LANGUAGES", ("en", "es"))  # the others take long
    source, target = split(split_parallel.DJANGO, tmp_path / "sides")
    assert tuple(source) == parallel_side.SPLITS
    texts = {}
    for name, own in source.items():
        assert own.keys() == target[name].keys()
        texts[name] = dict(zip(target[name].values(), own.values(), strict=True))
    assert texts["train"]["A JSON object"] == "Un objeto JSON"
    assert len(texts["train"]) > 300
    assert abs(len(texts["dev"]) - len(texts["test"])) <= 1
    assert texts["test"].keys().isdisjoint(texts["dev"].keys() | texts["train"].keys())


def test_without_django_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(corpora.CorpusError, match="pip install 'Django<6'"):
        split(split_parallel.DJANGO, tmp_path / "sides")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_pairs", [None, 1, 34])
def test_the_same_pairs_are_held_out_however_many_are_trained_on(
    text_folder, tmp_path, max_pairs
):
    source, target = split(
        text_folder, tmp_path / "sides", held_out=6, max_pairs=max_pairs
    )
    expected, _ = split(text_folder, tmp_path / "a", held_out=6, max_pairs=5)
    assert source["held_out"] == expected["held_out"]
    train, held_out = numbers(source, "train"), numbers(source, "held_out")
    assert len(train) == (max_pairs or TRAIN - 6)
    assert len(held_out) == 6
    assert not train & held_out
    pairs = {f"held_out-{n:06d}": pair(n) for n in held_out}
    assert target["held_out"] == {name: english for name, (english, _) in pairs.items()}
    assert source["held_out"] == {name: spanish for name, (_, spanish) in pairs.items()}
    assert list(source) == ["train", "dev", "test", "held_out"]


def test_the_training_pairs_are_those_without_any_held_out(text_folder, tmp_path):
    """As long as the two ends of the order do not meet."""
    plain, _ = split(text_folder, tmp_path / "plain", max_pairs=30)
    source, _ = split(text_folder, tmp_path / "some", max_pairs=30, held_out=10)
    assert source["train"] == plain["train"]
    fewer, _ = split(text_folder, tmp_path / "fewer", max_pairs=30, held_out=4)
    assert fewer["held_out"].items() < source["held_out"].items()
    chosen, _ = split(text_folder, tmp_path / "b", sources=["b"], held_out=4)
    assert all(n % 2 == 0 for n in numbers(chosen, "held_out"))
    assert numbers(chosen, "train") | numbers(chosen, "held_out") == {*range(2, 41, 2)}


def test_what_another_training_pair_has_on_one_side_is_not_held_out(tmp_path):
    """But for case, spaces and punctuation. Three pairs alone are like no other."""
    train = [
        *(("See you.", "Hasta luego."), ("see you!", "Nos vemos.")),
        *(("Bye.", "¡Adiós!"), ("Goodbye.", "Adiós")),
        *(("One", "Uno"), ("...", "¿?"), ("Two", "Dos")),
    ]
    folder = write_text(tmp_path / "text", train)
    for count in (1, 2, 3):
        source, _ = split(folder, tmp_path / f"{count}", held_out=count)
        assert len(source["held_out"]) == count
        assert numbers(source, "held_out") <= {5, 6, 7}
    with pytest.raises(
        corpora.CorpusError,
        match=r"train\.tsv: 4 pairs are to be held out; of 7 training pairs that fit,"
        r" 3 have texts that no other has",
    ):
        split(folder, tmp_path / "4", held_out=4)


@pytest.mark.parametrize(
    ("max_pairs", "wanted"), [(35, 35), (None, 1)], ids=["some", "all"]
)
def test_too_few_pairs_to_train_on_are_named(text_folder, tmp_path, max_pairs, wanted):
    count = 6 if max_pairs else TRAIN
    words = rf"of 40 .* {count} are to be held out; {40 - count} are left, not {wanted}"
    with pytest.raises(corpora.CorpusError, match=words):
        split(text_folder, tmp_path / "x", held_out=count, max_pairs=max_pairs)
    assert not (tmp_path / "x").exists()


def test_a_text_without_spaces_is_one_word(tmp_path):
    train = [("I am here now", "我现在在这里"), ("Yes", "是的"), ("No", "不")]
    for name in parallel_side.SPLITS:
        path = tmp_path / "text" / "parallel" / f"en-zh.{name}.tsv"
        write(path, "en\tzh", *map("\t".join, train))
    folders = split_parallel.split(
        tmp_path / "text", ("zh", "en"), tmp_path / "zh", max_words=3
    )
    assert numbers(read(folders)[0], "train") == {2, 3}


def test_flores_is_left_out_of_a_pair_that_it_does_not_have(tmp_path):
    text = write_text(tmp_path / "text", [(f"one {n}", f"uno {n}") for n in range(9)])
    flores = text / "parallel" / "flores200-devtest.15way.tsv"
    write(flores, "en\tfr", "an English one\tun français")
    source, _ = split(text, tmp_path / "without")
    assert set(source) == {"train", "dev", "test"}
    write(flores, "en\tfr\tes", "an English one\tun français\tun español")
    source, _ = split(text, tmp_path / "with")
    assert list(source) == ["train", "dev", "test", "flores"]
    assert source["flores"] == {"flores-000001": "un español"}
