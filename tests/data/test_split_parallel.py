"""Held-out pairs; the rest of `split` has its tests in test_parallel_side.py."""

import json

import pytest

from nebula_jax.data import parallel_side, split_parallel
from nebula_jax.data import text_folder as corpora

TRAIN = 40


def pair(n):
    return f"English {n}", f"español {n}"


@pytest.fixture
def text_folder(tmp_path):
    return write_text(tmp_path / "text", [pair(n) for n in range(1, TRAIN + 1)])


def write_text(folder, train):
    """A text folder with these training pairs, each from a source of its parity."""
    (folder / "parallel").mkdir(parents=True)
    others = [(f"English {name}", f"español {name}") for name in "abcd"]
    for split, pairs in (("train", train), ("dev", others), ("test", others)):
        rows = [f"{en}\t{es}\t{'ab'[n % 2]}" for n, (en, es) in enumerate(pairs)]
        path = folder / "parallel" / f"en-es.{split}.tsv"
        path.write_text("\n".join(["en\tes\tsource", *rows, ""]))
    return folder


def split(text_folder, out, **options):
    """The two sides' texts by split and id."""
    folders = split_parallel.split(text_folder, ("es", "en"), out, **options)
    return [
        {
            name: dict(zip(*read(folder, name), strict=True))
            for name in parallel_side.splits(folder)
        }
        for folder in folders
    ]


def read(folder, name):
    return parallel_side.read(parallel_side.path(folder, name))


def numbers(side, name):
    return {int(each.rpartition("-")[2]) for each in side[name]}


@pytest.mark.parametrize("max_pairs", [None, 1, 10, 34])
def test_the_same_pairs_are_held_out_however_many_are_trained_on(
    text_folder, tmp_path, max_pairs
):
    out = tmp_path / "sides"
    source, target = split(text_folder, out, held_out=6, max_pairs=max_pairs)
    (expected,) = split(text_folder, tmp_path / "a", held_out=6, max_pairs=5)[:1]
    assert source["held_out"] == expected["held_out"]
    assert source["held_out"].keys() == target["held_out"].keys()
    train, held_out = numbers(source, "train"), numbers(source, "held_out")
    assert len(train) == (max_pairs or TRAIN - 6)
    assert len(held_out) == 6
    assert not train & held_out
    for n in held_out:
        english, spanish = pair(n)
        assert target["held_out"][f"held_out-{n:06d}"] == english
        assert source["held_out"][f"held_out-{n:06d}"] == spanish
    assert parallel_side.splits(out / "source") == ("train", "dev", "test", "held_out")


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


def test_a_folder_made_before_is_still_one_without_held_out_pairs(
    text_folder, tmp_path
):
    out = tmp_path / "sides"
    split(text_folder, out)
    assert "held_out" not in json.loads((out / "split.json").read_text())
    before = (out / "source" / "train.tsv.gz").stat().st_mtime_ns
    split(text_folder, out, held_out=0)
    assert (out / "source" / "train.tsv.gz").stat().st_mtime_ns == before
    with pytest.raises(corpora.CorpusError, match="holds another split"):
        split(text_folder, out, held_out=2)


def test_a_text_without_spaces_is_one_word(tmp_path):
    train = [("I am here now", "我现在在这里"), ("Yes", "是的"), ("No", "不")]
    (folder := tmp_path / "text" / "parallel").mkdir(parents=True)
    for name in parallel_side.SPLITS:
        rows = "".join(f"{en}\t{zh}\n" for en, zh in train)
        (folder / f"en-zh.{name}.tsv").write_text("en\tzh\n" + rows)
    source, _ = split_parallel.split(
        tmp_path / "text", ("zh", "en"), tmp_path / "zh", max_words=3
    )
    assert read(source, "train").ids == ["train-000002", "train-000003"]


def test_flores_is_left_out_of_a_pair_that_it_does_not_have(tmp_path):
    text = write_text(tmp_path / "text", [(f"one {n}", f"uno {n}") for n in range(9)])
    flores = text / "parallel" / "flores200-devtest.15way.tsv"
    flores.write_text("en\tfr\nan English one\tun français\n")
    source, _ = split(text, tmp_path / "without")
    assert set(source) == {"train", "dev", "test"}
    flores.write_text("en\tes\nan English one\tun español\n")
    source, _ = split(text, tmp_path / "with")
    assert set(source) == {"train", "dev", "test", "flores"}
